"""A version as the trainer computes it: transformers in float32, one sample at a time. Impure: files, torch.

Invariant: independent of the engines, of which it is the judge; what it holds is a copy, and no file stays mapped.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from node.rollout.measured import free_bytes_here
from node.rollout.model_files import read_layout, stage_model
from protocol.canary import Probe, probe_for

MAX_WEIGHT_BYTES = 4 << 30
MEMORY_SHARE = 4
"""The weights, their change, and what the engine holds meanwhile."""
CHANGE = (0.9, 0.3)
"""A changed tensor is so much of itself and so much of its elements shifted by one."""


class Reference:
    """The model with one set of weights. Methods block."""

    def __init__(self, model: Any, weights: Path) -> None:
        self._model, self._weights = model, weights

    @staticmethod
    def is_affordable(weights: Path) -> bool:
        """Whether a second copy of the model has room here, in memory and among the temporary files."""
        num_bytes = weights.stat().st_size
        has_room = MEMORY_SHARE * num_bytes <= free_bytes_here()
        has_disk = 2 * num_bytes <= shutil.disk_usage(tempfile.gettempdir()).free
        return num_bytes <= MAX_WEIGHT_BYTES and has_room and has_disk

    @classmethod
    def load(cls, model_dir: Path, weights: Path) -> "Reference":
        """The model of the folder with the weights of the file. Takes about a second for each 200 MB."""
        import torch
        from transformers import AutoModelForCausalLM

        tied = "lm_head.weight" not in read_layout(weights)
        with tempfile.TemporaryDirectory(prefix="hexcomb-reference-") as folder:
            stage_model(Path(folder), model_dir, weights, tied=tied)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return cls(model.eval(), weights)

    def score(self, probe: Probe) -> tuple[float, ...]:
        """Log-probability of each scored token of the probe."""
        return score_probe(self._model, probe)

    def score_own_probe(self) -> tuple[float, ...]:
        """The same of the probe that goes with the model's vocabulary."""
        return self.score(probe_for(self._model.config.vocab_size))

    def change(self, path: Path) -> None:
        """Writes changed weights of the same layout to `path`, and takes them over; every tensor that is not nought
        throughout differs visibly."""
        import torch
        from safetensors.torch import load_file, save_file

        kept, shifted = CHANGE
        own = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        changed = {}
        with torch.no_grad():
            for name, tensor in load_file(self._weights).items():
                whole = tensor.float()
                new = whole * kept + whole.flatten().roll(1).view(tensor.shape) * shifted
                changed[name] = new.to(tensor.dtype)
                own[name].copy_(changed[name])
        save_file(changed, path, metadata={"format": "pt"})


def score_probe(model: Any, probe: Probe) -> tuple[float, ...]:
    """Log-probability of each scored token of the probe at temperature 1, by one forward pass of a transformers model
    in float32 on whatever device it is."""
    import torch

    num_scored = len(probe.completion_ids)
    ids_1T = torch.tensor([[*probe.prompt_ids, *probe.completion_ids]], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits_TV = model(input_ids=ids_1T, use_cache=False, logits_to_keep=num_scored + 1).logits[0, :-1]
        chosen_T1 = ids_1T[0, -num_scored:, None]
        return tuple(logits_TV.float().log_softmax(-1).gather(1, chosen_T1)[:, 0].tolist())
