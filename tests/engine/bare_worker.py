"""What runs in vLLM's process beside the product's own methods: loads as vLLM alone does them."""

from safetensors.torch import load_file

from node.rollout.vllm_extension import WorkerExtension


class BareWorker(WorkerExtension):
    """Has one method more."""

    def load_without_repacking(self, weights: str) -> None:
        """Leaves the packed copy of a tied output head as it was."""
        self.model_runner.reload_weights(weights_iterator=iter(load_file(weights).items()))
