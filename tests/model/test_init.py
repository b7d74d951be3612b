"""Initial values that a module declares: of any parameter, equal on any mesh, refused where nothing is declared."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

from model.build import meta_model
from model.init import Fill, constant, normal
from model.llama import Llama
from parallel.materialize import materialize
from parallel.tensor import apply_tensor_parallelism
from tests import forks
from tests.conftest import make_config, mesh_for, needs_extra, refuses
from tests.distributed import distributed
from tests.reference import fresh_model

CPU = torch.device("cpu")


@pytest.mark.quick
def test_declared_values_of_each_kind():
    with forks.with_parameters():
        model = fresh_model(make_config())
    block = model.blocks[1]
    assert block.gate.tolist() == [0.5]
    assert block.attention.sink.tolist() == [0, 1, 2, 3]
    assert block.factor != model.blocks[0].factor
    assert block.attention.q_proj.bias.std().item() == pytest.approx(0.5, rel=0.3)
    assert not torch.equal(block.scale, model.blocks[0].scale)


@pytest.mark.quick
@pytest.mark.parametrize("cutoff, beyond", [(math.inf, 0.317), (1.0, 0.0)])
def test_normal_has_its_deviation_and_is_cut_off(cutoff, beyond):
    """The share beyond one standard deviation, of 100,000 values."""
    torch.manual_seed(0)
    values = torch.empty(1000, 100)
    normal(0.2, cutoff)(values, 0)
    assert values.mean().abs() < 0.002
    assert (values.abs() > 0.2 + 1e-6).float().mean().item() == pytest.approx(beyond, abs=0.01)


class Table(nn.Module):
    """A parameter of several blocks of rows, and a buffer of integers."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.empty(300, 1000))
        self.register_buffer("counts", torch.empty(70_000, dtype=torch.int64), persistent=False)
        self.init = {"rows": numbered, "counts": numbered}


def numbered(rows: Tensor, first_row: int) -> None:
    numbers = torch.arange(first_row, first_row + len(rows))
    rows.copy_(numbers.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows))


def test_a_fill_gets_each_row_once_and_its_number():
    model = Llama(make_config().model)
    model.table = Table()
    materialize(model, 0, CPU)
    assert torch.equal(model.table.rows, torch.arange(300.0)[:, None].expand(300, 1000))
    assert torch.equal(model.table.counts, torch.arange(70_000))


def with_norm(init: dict[str, Fill] | None, **parameters: Tensor) -> Llama:
    """A model whose last norm has these parameters, too. init: None for what RMSNorm declares."""
    model = meta_model(make_config().model)
    for name, value in parameters.items():
        model.head.norm.register_parameter(name, nn.Parameter(value.to("meta")))
    if init is not None:
        model.head.norm.init = init
    return model


@pytest.mark.quick
@pytest.mark.parametrize("init", [None, {}])
def test_a_parameter_without_a_declaration_is_refused_with_a_remedy_that_works(init):
    model = with_norm(init, offset=torch.empty(48))
    if init == {}:
        del model.head.norm.weight
    with refuses(r"head\.norm\.offset: nothing declares", '"offset": normal') as refused:
        materialize(model, 0, CPU)
    (declared,) = re.findall(r'"offset": \S+', str(refused.value))
    model.head.norm.init |= eval(f"{{{declared}}}", {"normal": normal})
    materialize(model, 0, CPU)
    assert model.head.norm.offset.std().item() == pytest.approx(0.02, rel=0.3)


def unfinished(rows: Tensor, first_row: int) -> None:
    rows[:3].zero_()


def test_values_that_a_declaration_leaves_out_are_refused():
    model = with_norm({"weight": constant(1.0), "offset": unfinished}, offset=torch.empty(48))
    with refuses(r"head\.norm\.offset: ", "not finite"):
        materialize(model, 0, CPU)


@pytest.mark.parametrize(
    "is_persistent, words", [(True, ": .*persistent=False"), (False, ": nothing declares")]
)
def test_a_buffer_that_is_stored_or_not_declared_is_refused(is_persistent, words):
    model = meta_model(make_config().model)
    block = model.blocks[1]
    block.register_buffer("table", torch.empty(3, device="meta"), persistent=is_persistent)
    block.init = {"table": constant(0.0)} if is_persistent else {}
    with refuses(r"blocks\.1\.table" + words):
        materialize(model, 0, CPU)


@pytest.mark.quick
@distributed(ranks=2, fake=True)
def test_tensor_parallelism_refuses_what_it_cannot_place(world):
    tp = mesh_for(make_config(parallel={"tp": 2}), world)
    model = with_norm(None, offset=torch.empty(48))
    with refuses(r"head\.norm\.offset: ", '`tp_dims`.*"offset": None'):
        apply_tensor_parallelism(model, tp)
    model.head.norm.tp_dims = {"offset": None}
    apply_tensor_parallelism(model, tp)


@pytest.mark.quick
@distributed(ranks=2, fake=True)
def test_tensor_parallelism_refuses_a_bias_that_it_would_add_on_each_rank(world):
    model = meta_model(make_config().model)
    model.blocks[0].feed_forward.down_proj = nn.Linear(80, 48, device="meta")
    model.blocks[0].feed_forward.down_proj.tp_dims = {"bias": None}
    with refuses(r"blocks\.0\.feed_forward\.down_proj\.bias: tp sums"):
        apply_tensor_parallelism(model, mesh_for(make_config(parallel={"tp": 2}), world))


@needs_extra("lora", "float8")
def test_a_layer_whose_bias_would_be_dropped_is_not_replaced():
    from extras.float8.matmul import use_float8
    from extras.lora.nf4 import quantize_projections

    for replace in (quantize_projections, lambda module: use_float8(module, "tensorwise", "cpu")):
        attention = meta_model(make_config(model={"dim": 64}).model).blocks[0].attention
        attention.q_proj.bias = nn.Parameter(torch.empty(64, device="meta"))
        with refuses(r"would drop q_proj\.bias"):
            replace(attention)
