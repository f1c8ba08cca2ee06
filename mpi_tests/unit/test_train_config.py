"""Configurations: read, refused with everything that is wrong, written back, explained."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.tables import write_value
from hpctrain.train.config import SECTIONS, all_keys, build_config, parse_config, to_toml
from hpctrain.train.config.explaining import explain, json_schema, list_keys, markdown, template

SMALLEST = """
[model]
build = "net:make"
[data]
build = "data:load"
evaluation = "data:test"
[train]
global_batch = 64
loss = "mse_loss"
[optimizer]
lr = 1
"""


def mistakes(text, *settings):
    with pytest.raises(ConfigError) as raised:
        parse_config(text, settings)
    return str(raised.value)


def test_the_smallest_file_and_its_defaults():
    config = parse_config(SMALLEST)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.optimizer.name == "AdamW"
    assert config.train.num_epochs == 1
    assert config.faults.signals == ("SIGUSR2", "SIGUSR1", "SIGTERM")


def test_all_mistakes_are_told_at_once_with_the_nearest_names():
    said = mistakes("""
[modle]
build = "x:y"
[model]
build = "no_colon"
biuld = 3
[data]
build = "a:b"
epochs = 3
[train]
globalbatch = 64
loss = "mse_loss"
device = "cud"
accumulate = true
seed = -1
[optimizer]
lr = "high"
learning_rate = 0.1
[schedule]
milestones = [3, -1]
[precision]
kind = "fp61"
""")
    for expected in (
        "13 mistakes",
        "[modle] is unknown; did you mean [model]?",
        "model.biuld is unknown; did you mean model.build?",
        "model.build='no_colon' must be MODULE:FUNCTION",
        "data.epochs is unknown; did you mean train.epochs?",
        "train.globalbatch is unknown; did you mean train.global_batch?",
        "train.global_batch is missing",
        'train.device=\'cud\' must be "auto" or "cuda" or "cpu"; did you mean "cuda"?',
        "train.accumulate=true must be a whole number",
        "train.seed=-1 must be at least 0",
        "optimizer.lr='high' must be a number",
        "optimizer.learning_rate is unknown",
        "schedule.milestones=(3, -1) must be at least 0",
        "precision.kind='fp61' must be",
        'did you mean "fp16"?',
    ):
        assert expected in said, (expected, said)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.epochs=2|train.steps=5", "train.epochs and train.steps both define"),
        ("train.accumulate=7", "does not divide train.global_batch=64"),
        ("schedule.warmup_steps=5", 'belongs to schedule.name="recipe"'),
        ("schedule.name=recipe|schedule.every=epoch", "torch's schedules"),
        ("precision.init_scale=2.0", 'belongs to precision.kind="fp16"'),
        ("engine.share_parameters=true|engine.update=replicated", "needs engine.update"),
        ("engine.overlap=true|engine.update=sharded", "ask for messages"),
        ("checkpoint.every_s=3|checkpoint.every_steps=3", "both given"),
        ("checkpoint.keep_best=max:acc|checkpoint.enabled=false", "checkpoint.enabled"),
        ("faults.signals=['SIGNOSUCH']", "there is no signal SIGNOSUCH"),
        ("faults.signals=['SIGTERM','SIGTERM']", "names a signal twice"),
        ("data.files=['x.npy']", "both are given"),
        ("data.columns=['x']", "belong to data.files"),
        ("data.join=rows", "belong to data.files"),
        ("data.num_draws=5", "belongs to data.sample_weights"),
        ("data.bucket_batches=5", "belongs to data.lengths"),
        ("data.lengths=a.npy|data.sample_weights=b.npy", "both choose the samples"),
        ("data.lengths=a.npy|data.shuffle=false", "data.lengths determines the order"),
        ("data.evaluation_files=['x.npy','y.npy']", 'add join = "rows"'),
        ("data.evaluation_files=['a.h5']|data.columns=['x']|data.join=columns", "leave one of"),
        ("optimizer.args.lr=1", "is optimizer.lr; write it there"),
        ("optimizer.exclude_norms=true", "needs optimizer.weight_decay"),
        ("optimizer.clip_norm=1|optimizer.clip_value=1", "choose one"),
        ("train.min_delta=0.1", "belongs to train.patience"),
        (
            "schedule.name=ReduceLROnPlateau|schedule.every=step",
            "steps after every evaluation; leave it out",
        ),
        (
            "schedule.name=ReduceLROnPlateau|schedule.every=epoch|train.evaluate_every_steps=5",
            "needs an evaluation after every epoch",
        ),
        (
            "schedule.name=ReduceLROnPlateau|schedule.args.mode=max",
            'mode="max" and train.monitor="min:loss" contradict',
        ),
        ("schedule.name=StepLR|schedule.metric=min:loss", "belongs to ReduceLROnPlateau"),
        ("ema.warm_up=true", "belong to ema.decay"),
        ("ema.decay=1.0", "must be at least 0 and below 1"),
        ("model.compile_mode=max-autotune", "belongs to model.compile=true"),
        (
            "model.compile=true|model.compile_backend=eager|model.compile_mode=max-autotune",
            'belongs to model.compile_backend="inductor"',
        ),
        ("logging.wandb_project=mine", 'belongs to logging.wandb="offline"'),
        ("optimizer.lr=nan", "must be finite"),
        ("lr=1", "write section.key=value"),
        ("optimzer.lr=1", "did you mean [optimizer]?"),
        ("optimizer.lrr=1", "did you mean optimizer.lr?"),
        ("optimizer.lr.x=1", "has no keys inside it"),
    ],
)
def test_what_does_not_go_together(setting, told):
    assert told in mistakes(SMALLEST, *setting.split("|"))


def test_without_an_evaluation_nothing_may_need_one():
    alone = SMALLEST.replace('evaluation = "data:test"\n', "")
    parse_config(alone)
    for setting in ("train.patience=3", 'train.metrics=["mae"]', "checkpoint.keep_best=min:loss"):
        assert "needs data.evaluation" in mistakes(alone, setting)
    assert "needs data.evaluation" in mistakes(alone, "ema.decay=0.9", "ema.evaluate=false")
    assert "needs data.evaluation" in mistakes(alone, "schedule.name=ReduceLROnPlateau")


def test_settings_come_on_top_and_quotes_can_be_left_out():
    config = parse_config(
        SMALLEST,
        (
            "train.epochs=3",
            "optimizer.name=SGD",
            "optimizer.args.momentum=0.9",
            "optimizer.args.nesterov=true",
            'train.metrics=["mae","mse"]',
            "model.args.sizes=[1, 2]",
            "data.args.inner.deep=name",
            "logging.directory=2026",
        ),
    )
    assert config.train.epochs == 3
    assert config.optimizer.name == "SGD"
    assert config.optimizer.args == {"momentum": 0.9, "nesterov": True}
    assert config.train.metrics == ("mae", "mse")
    assert config.model.args == {"sizes": [1, 2]}
    assert config.data.args == {"inner": {"deep": "name"}}
    assert config.logging.directory == "2026"


def test_no_file_and_no_toml(tmp_path):
    from hpctrain.train.config import load_config

    with pytest.raises(ConfigError, match=r"nosuch\.toml cannot be read"):
        load_config(tmp_path / "nosuch.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load_config(tmp_path / "bad.toml")


names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    texts,
    st.datetimes().map(lambda t: t.replace(microsecond=0, fold=0)),
    st.dates(),
    st.times().map(lambda t: t.replace(microsecond=0, fold=0)),
)
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


@given(trees)
def test_every_value_is_written_as_toml_reads_it(value):
    read = tomllib.loads(f"value = {write_value(value)}")["value"]
    assert repr(read) == repr(value)  # nan, and 0.0 beside -0.0


def test_what_toml_has_not_is_refused():
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        write_value({1, 2})
    with pytest.raises(ConfigError, match="must be text"):
        write_value({1: 2})


def values_of(key):
    """Values that a key allows, from its own description."""
    bounds = {"min_value": key.low, "max_value": key.high}
    if key.above is not None:
        bounds["min_value"] = key.above

    def of(part):
        if get_origin(part) is Literal:
            return st.sampled_from(get_args(part))
        if get_origin(part) is tuple:
            return st.lists(of(get_args(part)[0]), max_size=3, unique=True).map(tuple)
        if get_origin(part) is dict:
            return st.dictionaries(texts, trees, max_size=2).filter(lambda d: "nan" not in repr(d))
        if part is bool:
            return st.booleans()
        if part is int:
            whole = {
                k: None if v is None else int(v) + (k == "min_value") for k, v in bounds.items()
            }
            return st.integers(whole["min_value"], min(whole["max_value"] or 2**62, 2**62))
        if part is float:
            low = key.above if key.above is not None else key.low
            return st.floats(
                low,
                key.high if key.below is None else key.below,
                exclude_min=key.above is not None,
                exclude_max=key.below is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        if key.name == "signals":
            return st.sampled_from(["SIGUSR1", "SIGTERM", "SIGINT"])
        return st.from_regex(key.form, fullmatch=True) if key.form else texts

    return (
        st.one_of(of(part) for part in get_args(key.kind) or [key.kind] if part is not NoneType)
        if (get_origin(key.kind) not in (Literal, tuple, dict))
        else of(key.kind)
    )


@settings(max_examples=60)
@given(st.data())
def test_any_valid_configuration_survives_toml(data):
    tree = tomllib.loads(SMALLEST)
    for name in data.draw(st.lists(st.sampled_from(sorted(all_keys())), max_size=4, unique=True)):
        section, _, word = name.partition(".")
        tree.setdefault(section, {})[word] = data.draw(values_of(all_keys()[name]), label=name)
    refused = ""
    try:
        config = build_config(tree)
    except ConfigError as error:
        refused = str(error)
    # Each value alone is allowed: only what does not go together may be refused.
    assert " must be " not in refused
    assert " unknown" not in refused
    assume(not refused)
    again = parse_config(to_toml(config))
    assert again == config
    assert to_toml(again) == to_toml(config)


def test_the_schema_says_what_the_reader_knows():
    schema = json_schema()
    assert schema["required"] == ["model", "data", "train", "optimizer"]
    for title, cls in SECTIONS.items():
        described = schema["properties"][title]
        assert described["additionalProperties"] is False
        keys = {name.partition(".")[2]: key for name, key in all_keys().items()
                if name.partition(".")[0] == title}  # fmt: skip
        assert set(described["properties"]) == set(keys), cls
        for name, key in keys.items():
            assert described["properties"][name]["description"] == key.meaning
    train = schema["properties"]["train"]["properties"]
    assert train["global_batch"] == {
        "type": "integer", "minimum": 1, "description": all_keys()["train.global_batch"].meaning
    }  # fmt: skip
    assert schema["properties"]["optimizer"]["properties"]["lr"]["exclusiveMinimum"] == 0
    every = schema["properties"]["checkpoint"]["properties"]["every_s"]
    assert every["anyOf"] == [{"type": "number", "exclusiveMinimum": 0}, {"enum": ["auto"]}]
    assert every["default"] == "auto"


def test_explanations():
    said = explain("optimizer.lr")
    assert "above 0" in said
    assert "must be given" in said
    assert explain("lr") == said
    assert "a whole number" in explain("train.accumulate")
    assert "global_batch" in explain("train")
    with pytest.raises(ConfigError, match=r"did you mean train\.global_batch"):
        explain("train.globalbatch")
    with pytest.raises(ConfigError, match=r"model\.build or data\.build"):
        explain("build")
    for name, key in all_keys().items():
        assert key.name in list_keys()
        assert key.meaning.endswith("."), name


def test_the_template_is_a_configuration_with_every_key():
    text = template()
    assert parse_config(text).optimizer.lr == 0.001
    for name, key in all_keys().items():
        assert f"{key.name} = " in text, name


def test_the_documentation_has_the_tables_that_the_command_makes():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    tables = page[page.index("### [model]") :]
    assert tables == markdown(), "write what `hpctrain config explain --markdown` prints"


def test_the_verb(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(SMALLEST)
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["config", "show", str(file), "--set", "train.epochs=9"]) == 0
    assert parse_config(capsys.readouterr().out).train.epochs == 9
    assert main(["config", "show", str(file), "--set", "train.epoch=9"]) == 2
    assert "did you mean train.epochs?" in capsys.readouterr().err
    assert main(["config", "explain", "lr"]) == 0
    assert capsys.readouterr().out.strip() == explain("lr")


def test_configurations_are_read_without_torch_and_mpi():
    code = (
        "import sys; from hpctrain.train import config; import hpctrain.train.display;"
        "print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_dates_in_arguments_are_kept():
    config = parse_config(SMALLEST, ("data.args.since=2026-01-02",))
    assert config.data.args == {"since": datetime.date(2026, 1, 2)}
    assert parse_config(to_toml(config)) == config
