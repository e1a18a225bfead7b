from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from services.common.errors import ModelFileError
from services.common.model_manifest import read_manifest
from services.kv.layout import KvIdentity, first_mismatch
from services.models.load import load_model
from services.models.resolved import (
    build_manifest,
    identity,
    read_config,
    weight_files,
    write_manifest,
)
from tests.support.paged import PagedDriver
from tests.support.toy_model import make_toy_model

IDS = [(i * 37 + 5) % 290 + 3 for i in range(20)]

Tensors = dict[str, NDArray[np.float32]]


def rebuilt(model_dir: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the toy's tensors and describe the result by a fresh manifest."""
    make_toy_model(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")
    write_manifest(model_dir, build_manifest(model_dir, name="toy", source="test"))
    return model_dir


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor .*up_proj"),
        (lambda t: t.pop("lm_head.weight"), "no tensor lm_head"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(65, dtype=np.float32)}),
            "model.norm.weight: shape",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}),
            "does not belong",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, dtype=np.int32)}),
            "I32 weights",
        ),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], why: str
) -> None:
    with pytest.raises(ModelFileError, match=why):
        load_model(rebuilt(tmp_path, change))


def test_tensors_that_follow_from_the_configuration_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_model(rebuilt(tmp_path, lambda t: t.update({name: np.ones(8, dtype=np.float32)})))


def shard(model_dir: Path) -> None:
    """Split model.safetensors in two files with an index."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file_name = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, model_dir / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    write_manifest(model_dir, build_manifest(model_dir, name="toy", source="test"))


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    whole = PagedDriver(load_model(make_toy_model(tmp_path / "whole"))).step({"a": IDS})
    shard(make_toy_model(tmp_path / "cut"))
    assert torch.equal(PagedDriver(load_model(tmp_path / "cut")).step({"a": IDS}), whole)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shard(make_toy_model(tmp_path))
    first, second = weight_files(tmp_path)
    save_file({**load_file(second), **load_file(first)}, second)
    write_manifest(tmp_path, build_manifest(tmp_path, name="toy", source="test"))
    with pytest.raises(ModelFileError, match="two shards"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.bin", "absent.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    make_toy_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"safetensors"):
        weight_files(tmp_path)


def test_pickled_checkpoints_are_not_loaded(tmp_path: Path) -> None:
    """RB-121: unpickling a file is running it."""
    make_toy_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="pickled checkpoints"):
        weight_files(tmp_path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_widened_or_narrowed_to_float32(
    tmp_path: Path, stored: torch.dtype
) -> None:
    make_toy_model(tmp_path)
    exact = PagedDriver(load_model(tmp_path)).step({"a": IDS})
    tensors = load_file(tmp_path / "model.safetensors")
    narrow = {name: torch.from_numpy(array).to(stored) for name, array in tensors.items()}
    save_torch(narrow, tmp_path / "model.safetensors")
    write_manifest(tmp_path, build_manifest(tmp_path, name="toy", source="test"))
    got = PagedDriver(load_model(tmp_path)).step({"a": IDS})
    save_torch({n: t.float() for n, t in narrow.items()}, tmp_path / "model.safetensors")
    write_manifest(tmp_path, build_manifest(tmp_path, name="toy", source="test"))
    assert torch.equal(got, PagedDriver(load_model(tmp_path)).step({"a": IDS}))
    assert (got - exact).abs().max() < 0.5


def test_unaligned_tensors_load(tmp_path: Path) -> None:
    """The format does not promise alignment; an odd header length shifts every tensor."""
    make_toy_model(tmp_path)
    exact = PagedDriver(load_model(tmp_path)).step({"a": IDS})
    raw = (tmp_path / "model.safetensors").read_bytes()
    header_len = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + header_len] + b" "
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + raw[8 + header_len :]
    )
    assert torch.equal(PagedDriver(load_model(tmp_path)).step({"a": IDS}), exact)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_changed_small_file_is_noticed(tmp_path: Path, name: str) -> None:
    make_toy_model(tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text() + " ")
    with pytest.raises(ModelFileError, match=name):
        load_model(tmp_path)


def test_changed_weights_are_noticed_when_asked(tmp_path: Path) -> None:
    make_toy_model(tmp_path)
    load_model(tmp_path, verify_weights=True)
    raw = bytearray((tmp_path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(raw)
    load_model(tmp_path)
    with pytest.raises(ModelFileError, match="weights"):
        load_model(tmp_path, verify_weights=True)


def test_a_directory_that_was_not_resolved_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="isthmus model get"):
        load_model(tmp_path)


def test_an_unknown_dtype_is_refused(toy_dir: Path) -> None:
    with pytest.raises(ModelFileError, match="int3"):
        load_model(toy_dir, dtype="int3")


def test_generation_config_adds_end_ids(tmp_path: Path) -> None:
    make_toy_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert read_config(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 99_999}))
    with pytest.raises(ModelFileError, match="eos_token_id"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    make_toy_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    make_toy_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        build_manifest(tmp_path, name="toy", source="test")


def toy_identity(
    model_dir: Path, scheme: str = "s1", *, seed: int = 0, num_layers: int = 2
) -> KvIdentity:
    make_toy_model(model_dir, seed=seed, num_layers=num_layers)
    return identity(read_manifest(model_dir), hash_scheme=scheme)


def test_equal_models_have_equal_identities_and_others_name_the_field(tmp_path: Path) -> None:
    """RB-050's kind: two workers that cannot share KV must be able to say why."""
    ours = toy_identity(tmp_path / "a")
    assert ours.fingerprint == toy_identity(tmp_path / "b").fingerprint
    mismatches = {
        "weights_digest": toy_identity(tmp_path / "c", seed=1),
        "hash_scheme": toy_identity(tmp_path / "d", scheme="s2"),
        "num_layers": toy_identity(tmp_path / "e", num_layers=3),
    }
    for name, theirs in mismatches.items():
        found = first_mismatch(ours.fields(), theirs.fields())
        assert found is not None
        assert found[0] == name
        assert ours.fingerprint != theirs.fingerprint
