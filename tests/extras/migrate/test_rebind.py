"""An optimizer made before sharding: carried over it trains as one made after, and else it is refused."""

import itertools

import pytest
import torch
from torch import nn

from benchmarks.optimizer_before_sharding import SETTINGS, expected_difference, plot, table, to_text
from extras.migrate.rebind import rebind_optimizer
from model.llama import Llama
from optim import build_optimizer
from parallel.verify import check_optimizer
from tests.conftest import make_config
from tests.extras.migrate import rebind_cases

pytestmark = [pytest.mark.early, pytest.mark.slow]

PLAIN = {}
TIED = {"model": {"tie_embeddings": True}}
RECOMPUTED = {"parallel": {"recompute": "full"}}


def test_rebound_trains_bitwise_as_made_after(on_ranks):
    by_rank = on_ranks(2, rebind_cases.all_orders, [PLAIN, TIED, RECOMPUTED])
    for found in itertools.chain(*by_rank):
        expected = found.pop("after")
        assert expected["losses"][2] < expected["losses"][0]
        for ours in found.values():
            assert ours["losses"] == expected["losses"] and ours["weights"] == expected["weights"]
            # every full weight was freed while the model was being sharded
            assert ours["alive"] == 0
            # names in their order, hyper-parameters
            assert ours["before"] == ours["after"] == ours["end"]


def test_without_the_fix_nothing_is_learnt_and_it_is_refused(on_ranks):
    for found in on_ranks(2, rebind_cases.not_carried_over, PLAIN):
        assert found["weights"] == found["initial"] and found["states"] == 0
        assert found["alive"] == len(found["weights"])  # every full weight is kept
        assert "It lacks 21: embedding.weight, blocks.0" in found["error"]
        assert (
            "param_groups[0]['params'][0] (48,)" in found["error"]
            and "rebind_optimizer" in found["error"]
        )


def model_and_optimizer() -> tuple[Llama, torch.optim.Optimizer]:
    model = Llama(make_config().model)
    return model, torch.optim.AdamW(rebind_cases.groups(model), lr=3e-3)


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, words: str) -> None:
    entries = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=words), rebind_optimizer(model, optimizer):
        pytest.fail("it was accepted")
    for group, kept in zip(optimizer.param_groups, entries):  # and left as it was
        assert len(group["params"]) == len(kept) and all(
            a is b for a, b in zip(group["params"], kept)
        )


def test_an_optimizer_with_state_is_refused():
    model, optimizer = model_and_optimizer()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    refused(model, optimizer, "has state, which would be lost")
    refused(model, build_optimizer(model, make_config().optim), "build_optimizer")


def test_a_foreign_parameter_is_refused():
    model, optimizer = model_and_optimizer()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7, 5))]})
    refused(
        model,
        optimizer,
        r"param_groups\[2\]\['params'\]\[0\] \(7, 5\) is not a parameter of the model",
    )
    with pytest.raises(
        RuntimeError,
        match=r"holds 1 others: param_groups\[2\]\['params'\]\[0\] \(7, 5\) \(unknown\)",
    ):
        check_optimizer(model, optimizer)


def test_the_same_parameter_twice_is_refused():
    model, optimizer = model_and_optimizer()
    optimizer.param_groups[1]["params"].append(model.head.norm.weight)
    refused(model, optimizer, r"\(48,\) .*or the optimizer holds it already")


def test_a_name_that_is_gone_is_told():
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(ValueError, match="the model has no head.weight any more"),
        rebind_optimizer(model, optimizer),
    ):
        model.head.weight = model.embedding.weight


def test_after_an_exception_the_parameters_are_back():
    model, optimizer = model_and_optimizer()
    before = rebind_cases.described(model, optimizer)
    with pytest.raises(KeyError, match="within"), rebind_optimizer(model, optimizer):
        assert all(p.numel() == 0 for group in optimizer.param_groups for p in group["params"])
        raise KeyError("within")
    assert rebind_cases.described(model, optimizer) == before
    check_optimizer(model, optimizer)


def test_frozen_parameters_belong_in_no_optimizer():
    model, optimizer = model_and_optimizer()
    model.head.weight.requires_grad = False
    with pytest.raises(RuntimeError, match=r"\(320, 48\) \(head.weight, which is frozen\)\."):
        check_optimizer(model, optimizer)
    check_optimizer(model, build_optimizer(model, make_config().optim))


def test_state_for_some_parameters_only_is_refused():
    """A resumed run would begin without the others', and nothing would tell."""
    model, optimizer = model_and_optimizer()
    optimizer = build_optimizer(model, make_config().optim)
    del optimizer.state[model.head.weight]
    with pytest.raises(
        RuntimeError, match=r"has state, but none for head\.weight: .*build_optimizer"
    ):
        check_optimizer(model, optimizer)
    optimizer.state.clear()
    check_optimizer(model, optimizer)  # as plain SGD


def test_the_benchmark_measures_the_formula(tmp_path):
    """4P(1 - 2/N) at N = 2 and 4, to the bytes of AdamW's step counts: one float32 for each parameter tensor."""
    small = {
        **SETTINGS,
        "model": {**SETTINGS["model"], "dim": 64, "ffn_dim": 128, "vocab_size": 256},
    }
    with torch.device("meta"):
        tensors = len(list(Llama(make_config(model={"n_layers": 4}).model).parameters()))
    rows = []
    for ranks in (2, 4):
        after, before, rebound = table(ranks, ["after", "before", "rebind"], small)
        assert before["formula"] == expected_difference(before["parameters"], ranks)
        assert abs(before["more than after"] - before["formula"]) <= 4 * tensors
        assert rebound["total"] == after["total"] and rebound["losses"] == after["losses"]
        assert after["moved"] and not before["moved"] and before["states made"] == 0
        # zero_grad() does not reach the model's gradients either: they stay, and grow from step to step
        assert (
            before["after zero_grad"] == before["total"]
            and after["after zero_grad"] < after["total"]
        )
        rows += [after, before, rebound]
    assert rows[1]["formula"] == 0 and rows[4]["formula"] == 2 * rows[4]["parameters"]
    assert "| 4 | before |" in to_text(rows)
    plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
