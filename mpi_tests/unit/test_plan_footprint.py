"""Footprints from torch's fake device: what units hold, keep, send and compute; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.predict import Subject, measure_footprint
from hpctrain.predict.fake_device import state_copies, units_of
from hpctrain.sharding import choose_units, module_facts

WIDTH, ROWS = 16, 6
FILE = """
from mpi_tests.unit.test_plan_footprint import Tower, subject

def make():
    return subject(Tower())
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, *, depth=3, words=40, tied=True):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(WIDTH))
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subject(model, optimizer=torch.optim.AdamW, **options):
    x, y = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    return Subject(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.1, **options),
        loss=lambda: functional.cross_entropy(model(x), y),
        batch=ROWS,
    )


def test_units_are_found_in_the_tree():
    blocks = {f"blocks.{index}": False for index in range(3)}
    assert units_of(Tower()) == {"words": True, **blocks, "head": True}
    assert units_of(nn.Linear(2, 2)) == {"": True}
    wrapped = nn.Module()
    wrapped.inner = Tower()
    wrapped.last = nn.Linear(2, 2)
    assert list(units_of(wrapped))[-2:] == ["inner.head", "last"]


@pytest.mark.parametrize(
    "model",
    [
        Tower(),
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
        nn.Sequential(nn.Sequential(Block(), Block()), nn.Tanh(), Block()),
    ],
)
def test_units_are_those_that_split_gathers(model):
    alone = [name for name, in_root in units_of(model).items() if not in_root]
    assert alone == list(choose_units(*module_facts(model)))


def test_bytes_by_hand():
    found = measure_footprint(lambda: subject(Tower()), tensor={"*.up": "column", "*.down": "row"})
    assert [unit.name for unit in found.units] == [
        *("words", "blocks.0", "blocks.1", "blocks.2", "head")
    ]
    words, block, head = found.units[0], found.units[1], found.units[-1]
    float_bytes, row = 4, 4 * ROWS * WIDTH
    assert words.weights == float_bytes * (40 * WIDTH + WIDTH), "with the model's own parameter"
    matrices = 2 * 4 * WIDTH * WIDTH
    assert block.weights == float_bytes * (2 * WIDTH + matrices + 5 * WIDTH)
    assert block.tensor_weights == float_bytes * (matrices + 4 * WIDTH), "row keeps its bias"
    # The norm's result and its two statistics, before and after gelu, and the sum.
    assert block.activation_bytes == row + 2 * float_bytes * ROWS + 2 * 4 * row + row
    assert block.tensor_activation_bytes == 2 * 4 * row
    assert block.output_bytes == row
    assert (block.tensor_messages, block.tensor_message_bytes) == (2, 2 * row)
    assert block.flops == block.tensor_flops == 3 * 2 * ROWS * matrices
    assert head.weights == 0
    (tie,) = found.ties
    assert (tie.first, tie.other, tie.num_bytes) == (0, 4, float_bytes * 40 * WIDTH)
    assert found.state_copies == 2
    assert dict(found.tensor_sizes) == {
        f"blocks.{index}.{name}": 4 * WIDTH for name in ("up", "down") for index in range(3)
    }


def test_a_vocabulary_and_heads_are_divided():
    def make():
        model = Tower(tied=False)
        model.blocks[0].num_heads = 2
        return subject(model)

    kinds = {"words": "vocabulary", "head": "vocabulary", "*.up": "column", "*.down": "row"}
    found = measure_footprint(make, tensor=kinds)
    words, head = found.units[0], found.units[-1]
    assert words.tensor_weights == head.tensor_weights == 4 * 40 * WIDTH
    row = 4 * ROWS * WIDTH
    assert (words.tensor_messages, words.tensor_message_bytes) == (1, row), "its rows, added up"
    assert (head.tensor_messages, head.tensor_message_bytes) == (1, row), "its input's gradient"
    sizes = dict(found.tensor_sizes)
    assert (sizes["words"], sizes["head"], sizes["blocks.0.up (num_heads)"]) == (40, 40, 2)


def test_layers_that_a_pipeline_is_cut_at():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.body = Body()
            self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x):
            return self.last(self.body(self.first(x)))

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(2)])

        def forward(self, x):
            return x + self.blocks[1](self.blocks[0](x))

    def make():
        model, x = Chain(), torch.zeros(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Subject(model=model, optimizer=optimizer, loss=lambda: model(x).sum(), batch=ROWS)

    found = measure_footprint(make)
    assert [(unit.name, unit.layer) for unit in found.units] == [
        ("first", ""),
        ("body.blocks.0", "body"),
        ("body.blocks.1", "body"),
        ("last.0", ""),
        ("last.1", ""),
    ]
    assert found.layers == [range(1), range(1, 3), range(3, 5)]
    assert not found.no_stages
    assert "Tower is no chain of modules" in measure_footprint(lambda: subject(Tower())).no_stages


def test_activations_are_those_that_a_real_step_keeps():
    parts = subject(Tower(tied=False))
    kept: dict[int, int] = {}
    mine = {p.untyped_storage().data_ptr() for p in parts.model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = parts.loss()
    found = measure_footprint(lambda: subject(Tower(tied=False)))
    # Sums are kept where they are made, whether autograd keeps them or the next unit.
    loss_bytes = loss.untyped_storage().nbytes()
    assert abs(found.activation_bytes - sum(kept.values())) <= loss_bytes


def test_a_model_larger_than_this_machine():
    def make():
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16) for _ in range(16)])
        x = torch.zeros(2, 1 << 16)
        return Subject(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=lambda: model(x).sum(),
            batch=2,
        )

    found = measure_footprint(make)
    assert found.weights == 16 * 4 * ((1 << 32) + (1 << 16))
    assert found.state_copies == 1
    assert len(found.units) == 16


def test_state_of_optimizers():
    def copies(kind, **options):
        optimizer = kind([nn.Parameter(torch.zeros(3))], lr=0.1, **options)
        found = state_copies(optimizer, optimizer.param_groups[0])
        assert not optimizer.state, "the user's optimizer is left as it was"
        return found

    assert copies(torch.optim.SGD) == 0
    assert copies(torch.optim.SGD, momentum=0.9) == 1
    assert copies(torch.optim.AdamW, amsgrad=True) == 3


def test_frozen_weights_have_neither_gradients_nor_state():
    def make():
        model = Tower()
        model.blocks[0].requires_grad_(False)
        return subject(model)

    found = measure_footprint(make)
    assert found.units[1].trained == 0 < found.units[1].weights
    assert found.units[2].trained == found.units[2].weights


def test_casts_are_not_activations():
    whole = measure_footprint(lambda: subject(Tower()))
    half = measure_footprint(lambda: subject(Tower()), precision="bf16")
    assert whole.units[1].cast_bytes == 0
    matrices = 2 * 4 * WIDTH * WIDTH
    assert half.units[1].cast_bytes == 2 * matrices
    assert half.units[1].activation_bytes < whole.units[1].activation_bytes


def test_checkpointed_blocks_keep_their_input():
    from hpctrain.optim import checkpoint_activations

    def make():
        model = Tower()
        checkpoint_activations(model, "blocks.*")
        return subject(model)

    plain = measure_footprint(lambda: subject(Tower()))
    spared = measure_footprint(make)
    row = 4 * ROWS * WIDTH
    assert [unit.activation_bytes for unit in spared.units[1:4]] == [row] * 3
    assert spared.flops > plain.flops, "backward computes forward again"


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x)
        return out if out.sum().item() > 0 else -out


def test_what_does_not_run_without_data_is_refused_by_name(capfd):
    def make():
        model, x = Looks(), torch.zeros(2, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Subject(model=model, optimizer=optimizer, loss=lambda: model(x).sum(), batch=2)

    with pytest.raises(ConfigError, match=r"Looks does not run on the fake device.*DataDependent"):
        measure_footprint(make)

    def narrow():
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.zeros(2, 3)
        return Subject(model=model, optimizer=optimizer, loss=lambda: model(x).sum(), batch=2)

    with pytest.raises(
        ConfigError, match=r"failed on the example batch, inputs of float32"
    ) as told:
        measure_footprint(narrow)
    assert "(2, 3): RuntimeError" in str(told.value)
    assert "item()" not in str(told.value)
    assert "Traceback" not in capfd.readouterr().err

    def broken():
        raise KeyError("vocabulary")

    with pytest.raises(ConfigError, match=r"cannot be built on the fake device.*KeyError"):
        measure_footprint(broken)


def test_models_that_are_moved_or_cast_while_they_are_built():
    def make():
        tower = Tower().to("cpu").to(torch.bfloat16)
        assert tower.head.weight is tower.words.weight
        return subject(tower)

    found = measure_footprint(make)
    assert found.units[0].weights == 2 * 41 * WIDTH
    assert len(found.ties) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused():
    def make():
        model = nn.Linear(WIDTH, WIDTH, device="cuda")
        return Subject(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda: model(torch.zeros(2, WIDTH, device="cuda")).sum(),
            batch=2,
        )

    with pytest.raises(ConfigError, match=r"cuda.*CPU"):
        measure_footprint(make)


def test_patterns_and_precisions_are_checked():
    for pattern, style, told in (
        ("*.up", "diagonal", "choose 'column', 'row', 'vocabulary'"),
        ("*.nosuch", "column", "matches no linear or embedding layer"),
        ("*.norm", "column", "matches no linear or embedding layer"),
        ("words", "row", "is an embedding and can be 'vocabulary'"),
    ):
        with pytest.raises(ConfigError, match=told):
            measure_footprint(lambda: subject(Tower()), tensor={pattern: style})
    with pytest.raises(ConfigError, match="fp8"):
        measure_footprint(lambda: subject(Tower()), precision="fp8")


@pytest.fixture
def words(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    return ["plan", "--memory", "--subject", f"{tmp_path}/own.py:make", "--ranks", "2"]


def test_the_command_says_what_is_missing(words, capsys):
    assert main(words) == 2
    assert "--memory-per-rank 80GB" in capsys.readouterr().err
    assert main([*words, "--memory-per-rank", "a lot"]) == 2
    assert "--memory-per-rank a lot: write it as 80GB" in capsys.readouterr().err
    assert main(["plan", "--memory", "--ranks", "2"]) == 2
    assert "--subject FILE.py:NAME or CONFIG.toml" in capsys.readouterr().err
    assert main(["plan", "--memory-per-rank", "1GB", "--ranks", "2"]) == 2
    assert "--memory-per-rank is for --memory" in capsys.readouterr().err
    assert main([*words, "--tflops", "1", "--profile", "p.json"]) == 2
    assert "give one" in capsys.readouterr().err


def test_the_command_prints_what_fits_and_what_does_not(words, capsys):
    given = [*words, "--memory-per-rank", "1MiB"]
    assert main([*given, "--micro-batch", "7"]) == 1
    assert "no grid is possible: a micro-batch of 7 does not divide" in capsys.readouterr().out
    assert main([*words, "--memory-per-rank", "10KiB", "--micro-batch", "1"]) == 1
    assert "too much" in capsys.readouterr().out
    assert main([*given, "--tensor", "*.up=column", "--tensor", "*.down=row"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("SIMULATED: Tower")
    assert "take it by Grid(world, data=2, pipeline=1, tensor=1)" in shown.out
    assert "step times are not predicted" in shown.err
