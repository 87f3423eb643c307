"""The CPU adaptation of megatron-core: complete, loud about what it does not find, and gone after `revert`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hardware.base import HardwareError
from hardware.cpu.megatron import CpuMegatron, TorchOnCpu
from hardware.megatron import Attribute, MegatronAdapter, ModuleGlobal, Recode, resolve
from tests.contract.adapters import changed, snapshot


@pytest.fixture
def adapter() -> Iterator[CpuMegatron]:
    """Megatron-core imported, and as it came."""
    adapter = CpuMegatron()
    adapter.apply()
    adapter.revert()
    yield adapter
    adapter.revert()


def test_revert_leaves_nothing(adapter: CpuMegatron) -> None:
    before = snapshot()
    adapter.apply()
    rebound = changed(before, snapshot())
    assert "megatron.core.tensor_parallel.layers:torch" in rebound
    assert "megatron.core.tensor_parallel.random:_set_cuda_rng_state" in rebound
    assert not [key for key in rebound if not key.startswith("megatron.core")], "torch itself was changed"
    adapter.revert()
    assert changed(before, snapshot()) == set()


def test_apply_twice_is_apply_once(adapter: CpuMegatron) -> None:
    before = snapshot()
    adapter.apply()
    CpuMegatron().apply()
    adapter.revert()
    assert changed(before, snapshot()) == set()


def test_every_row_has_a_reason(adapter: CpuMegatron) -> None:
    assert all(row.reason for row in adapter.table())


@pytest.mark.parametrize(
    "row",
    [
        Attribute("megatron.core.optimizer.clip_grads:no_such_function", None, "a test"),
        Attribute("megatron.core.no_such_module:name", None, "a test"),
        Attribute("megatron.core.optimizer.optimizer:FP32Optimizer.no_such_method", None, "a test"),
        ModuleGlobal("no_such_global", object(), None, "a test"),
        Recode("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", "a test", constants=(("no such text", "x"),)),
        Recode("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", "a test", names=(("no_such_name", "x"),)),
    ],
    ids=["function", "module", "method", "global", "constant", "name"],
)
def test_missing_target_fails_and_undoes_the_rest(adapter: CpuMegatron, row: Any) -> None:
    class Broken(CpuMegatron):
        def table(self) -> list[Any]:
            return [*super().table(), row]

    before = snapshot()
    with pytest.raises(HardwareError, match="megatron-core"):
        Broken().apply()
    assert changed(before, snapshot()) == set()


def test_recode_reaches_other_names_of_a_function(adapter: CpuMegatron) -> None:
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    clip: Callable[..., None] = optimizer.clip_grad_by_total_norm_fp32  # imported there by name
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)  # norm 4
    with pytest.raises((AssertionError, RuntimeError)):
        clip([parameter], 1.0, 4.0)
    adapter.apply()
    clip([parameter], 1.0, 4.0)
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def test_the_device_layer_answers_for_the_cpu() -> None:
    seen = TorchOnCpu()
    cpu = torch.device("cpu")
    assert seen.cuda.current_device() == cpu
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0), cpu, None):
        assert seen.zeros(2, device=device).device == cpu
    assert seen.empty(2, device="meta").device.type == "meta"
    assert not seen.empty(2, pin_memory=True).is_pinned()
    assert seen.nn is torch.nn
    with seen.cuda.stream(seen.cuda.Stream()) as stream:
        stream.wait_stream(seen.cuda.current_stream())
    seen.cuda.synchronize()
    state = seen.cuda.get_rng_state()
    first = torch.rand(3)
    seen.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_plain_adapter_rebinds_one_function_of_megatron() -> None:
    adapter = MegatronAdapter()
    adapter.apply()
    before = snapshot()
    adapter.revert()
    names = {name.replace(":", ".").rpartition(".")[2] for name in changed(before, snapshot())}
    assert names == {"get_tensor_model_parallel_group_if_none"}
    assert resolve("megatron.core.optimizer.clip_grads:get_grad_norm_fp32")[1] == "get_grad_norm_fp32"
