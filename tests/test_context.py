"""Context parallelism by itself: attention against torch's own of the whole sequence, equal work, activations."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from model.attention import attention, make_mask
from parallel.context import local_mask_mod, local_positions
from parallel.mesh import World, build_mesh
from tests import cases
from tests.conftest import make_config, needs_extra

pytestmark = pytest.mark.early


@pytest.mark.parametrize("ranks, draws", [(2, 40), (4, 24)])
def test_attention_is_that_of_the_whole_sequence(on_ranks, ranks, draws):
    """Outputs and gradients, of random lengths, heads, groups and documents."""
    assert max(on_ranks(ranks, cases.attention_over_cp, draws)) < 1e-6


def positions_of(rank: int, ranks: int, length: int) -> torch.Tensor:
    """Those of a rank's tokens."""
    mesh = SimpleNamespace(get_local_rank=lambda name: rank)
    return local_positions(SimpleNamespace(cp=ranks, mesh=mesh), length)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_balanced(ranks):
    """Blocks of scores that FlexAttention computes: less than 1 % between the ranks, and half of all together."""
    length = 8192
    blocks = []
    everything = []
    for rank in range(ranks):
        cp_positions = positions_of(rank, ranks, length)
        everything += cp_positions.tolist()
        mask = create_block_mask(
            local_mask_mod(None, cp_positions), 1, None, len(cp_positions), length, "cpu"
        )
        blocks.append((mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item())
    assert max(blocks) < 1.01 * min(blocks)
    side = length // 128
    assert sum(blocks) == side * (side + 1) // 2
    assert sorted(everything) == [*range(length)]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("masked", [False, True])
def test_block_mask_of_a_part_is_the_plain_mask(masked):
    """The form that a GPU takes, computed here without being compiled: one mask for any batch, or one of documents."""
    length, generator = 512, torch.Generator().manual_seed(0)
    cp_positions = positions_of(1, 2, length)
    documents = (
        torch.randint(0, 6, (2, length), generator=generator).sort(dim=1).values if masked else None
    )
    q = torch.randn(2, 4, len(cp_positions), 16, generator=generator)
    k, v = torch.randn(2, 2, 2, length, 16, generator=generator)
    rule, batch = local_mask_mod(documents, cp_positions), 2 if masked else 1
    block = create_block_mask(rule, batch, None, len(cp_positions), length, "cpu")
    plain = make_mask(rule, batch, len(cp_positions), length, torch.device("cpu"))
    assert torch.allclose(attention(q, k, v, block), attention(q, k, v, plain), atol=1e-5)


MODEL = {"dim": 48, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 96}
SETTINGS = ["none", "elementwise", "selective", "full"]


@pytest.fixture(scope="module")
def of_a_block(on_ranks):
    """{(cp, tp): {recompute: bytes that a block keeps of two sequences}}: what a second pair of them adds."""
    found = {}
    for cp, tp in (1, 1), (1, 2), (2, 1), (2, 2):
        runs = []
        for setting in SETTINGS:
            parallel = {"dp_shard": 1, "cp": cp, "tp": tp, "recompute": setting}
            for sequences in (4, 2):
                train = {"seq_len": 64, "micro_batch_size": sequences}
                runs.append({"model": MODEL, "train": train, "parallel": parallel})
        kept = on_ranks(cp * tp, cases.kept_bytes, runs)[-1]
        found[cp, tp] = {
            setting: more - less for setting, more, less in zip(SETTINGS, kept[::2], kept[1::2])
        }
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_activations_fall_as_1_over_tp_and_cp(of_a_block, setting):
    """To the byte; but over tp "selective" keeps what the first reduce-scatter gave, too: not to send it again."""
    alone = of_a_block[1, 1][setting]
    kept_too = 2 * 64 * MODEL["dim"] * 4 if setting == "selective" else 0
    for (cp, tp), kept in of_a_block.items():
        assert kept[setting] == (alone + kept_too * (tp > 1)) / (cp * tp) > 0, (cp, tp)


@needs_extra("planner")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_plan_knows_what_a_block_keeps(of_a_block, setting):
    """Of the one that keeps other tensors with tp on any mesh, of the others on that with most ranks."""
    from extras.planner.simulate import simulate

    for (cp, tp), kept in (
        of_a_block.items() if setting == "selective" else [max(of_a_block.items())]
    ):
        blocks = []
        for sequences in (4, 2):
            cfg = make_config(
                model={**MODEL, "n_layers": 3},
                train={"seq_len": 64, "micro_batch_size": sequences},
                parallel={"dp_shard": 1, "cp": cp, "tp": tp, "recompute": setting},
            )
            ends = {
                phase.name: phase.end["activations"]
                for phase in simulate(cfg, cp * tp, on_gpu=False).phases
            }
            blocks.append(ends["forward block 2"] - ends["forward block 1"])
        assert blocks[0] - blocks[1] == kept[setting], (cp, tp)


def test_tp_groups_that_span_machines_are_told(monkeypatch):
    from parallel.tensor import tp_warnings

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with cases.fake_process_group(24):
        for tp, told in (2, 0), (4, 1):
            found = tp_warnings(
                World(0, 24, torch.device("cpu"), build_mesh("cpu", (1, 24 // tp, 1, tp)))
            )
            assert len(found) == told and all(
                "tp = 4 does not divide the 6 ranks" in note for note in found
            )


def test_a_pass_without_backward_leaves_nothing():
    """What is kept for it goes with its result, a kept result of an operator too."""
    from parallel.collectives import all_gathered

    def kept() -> weakref.ref:
        def gather(x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        with all_gathered(gather, torch.randn(8, 8, requires_grad=True), True) as whole:
            torch.softmax(whole, -1)
        return weakref.ref(gather)

    reference = kept()
    gc.collect()
    assert reference() is None


def test_what_backward_gathers_again_goes_when_it_was_used():
    from parallel.collectives import all_gathered

    found = []

    def gather(x: torch.Tensor) -> torch.Tensor:
        whole = x * 1.0
        found.append(weakref.ref(whole))
        return whole

    part = torch.randn(8, 8, requires_grad=True)
    with all_gathered(gather, part, True) as whole:
        result = (whole.square() * whole).sum()
    for times in 2, 3:
        result.backward(retain_graph=True)
        assert len(found) == times and found[-1]() is None
