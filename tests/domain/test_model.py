"""What a model, its versions and its aliases may and may not become."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.domain import model
from controlplane.domain.decider import Event, fold
from controlplane.domain.errors import Invalid
from controlplane.domain.model import (
    Access,
    AddAlias,
    AddVersion,
    ChangeAccess,
    ModelAccessChanged,
    ModelAliasAdded,
    ModelAliasRemoved,
    ModelDefaultVersionSet,
    ModelPriceSet,
    ModelRegistered,
    ModelVersionAdded,
    ModelVersionRetired,
    ModelVersionScaled,
    RegisterModel,
    RemoveAlias,
    RetireVersion,
    ScaleVersion,
    SetDefaultVersion,
    SetModelPrice,
    default_version,
    price_of,
)
from controlplane.domain.money import FREE, Price
from controlplane.domain.version_spec import Colocation, Needs, check_replicas, check_spec
from tests.domain.samples import SPEC
from tests.domain.scenario import Scenario

M = "smollm2"
REGISTERED = ModelRegistered(M, 1.0)
ADDED = ModelVersionAdded(M, SPEC, 2.0)
SPEC2 = replace(SPEC, version="v2")
ADDED2 = ModelVersionAdded(M, SPEC2, 3.0)
PRICE = Price(150_000, 75_000, 600_000)
GUARANTEED = {"priority": "high", "guaranteed_percent": 40}
EMBED = {"task": "embed", "speculation": "none", "draft_model": "", "swap_bytes": None}
NGRAM = {"speculation": "ngram", "draft_model": ""}
VLLM = {"engine": "vllm", "speculation": "none", "draft_model": "", "swap_bytes": None}
RETIRED = ModelVersionRetired(M, "v1", 4.0)


def given(*events: Event) -> Scenario:
    return Scenario(model.DECIDER, events)


def test_registering_again_changes_nothing() -> None:
    given().when(RegisterModel(M, 1.0)).then(REGISTERED)
    given(REGISTERED).when(RegisterModel(M, 2.0)).then_nothing()
    given().when(RegisterModel("../../etc", 1.0)).then_refused("invalid_name")


@pytest.mark.parametrize(
    "command",
    [
        AddVersion(M, SPEC, 9.0),
        ScaleVersion(M, "v1", 1, 1, 9.0),
        RetireVersion(M, "v1", 9.0),
        SetDefaultVersion(M, "v1", 9.0),
        AddAlias(M, "small", 9.0),
        RemoveAlias(M, "small", 9.0),
        ChangeAccess(M, Access(), 9.0),
        SetModelPrice(M, "v1", PRICE, 9.0),
    ],
)
def test_an_unknown_model_is_not_found(command: model.ModelCommand) -> None:
    given().when(command).then_refused("model_not_found")


def test_a_version_is_added_once_and_never_changed() -> None:
    given(REGISTERED).when(AddVersion(M, SPEC, 2.0)).then(ADDED)
    given(REGISTERED, ADDED).when(AddVersion(M, SPEC, 3.0)).then_nothing()
    other = replace(SPEC, gpu_memory=1)
    given(REGISTERED, ADDED).when(AddVersion(M, other, 3.0)).then_refused("version_exists")
    given(REGISTERED, ADDED, RETIRED).when(AddVersion(M, SPEC, 5.0)).then_refused("version_exists")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": "V 1"}, "invalid_name"),
        ({"source": "/etc/passwd"}, "source_not_allowed"),
        ({"source": "http://169.254.169.254/x"}, "source_not_allowed"),
        ({"source": "hf://"}, "source_not_allowed"),
        ({"quantization": "int3"}, "invalid_choice"),
        ({"priority": "urgent"}, "invalid_choice"),
        ({"format": "pickle"}, "invalid_choice"),
        ({"policy": "random"}, "invalid_choice"),
        ({"kv_cache_dtype": "fp8"}, "invalid_choice"),
        ({"speculation": "psychic"}, "invalid_choice"),
        ({"disaggregation": "by-hand"}, "invalid_choice"),
        ({"speculation": "draft", "draft_model": ""}, "unsupported_combination"),
        ({"speculation": "none"}, "unsupported_combination"),
        ({"speculation": "draft", "draft_model": "/models/small"}, "source_not_allowed"),
        ({"speculation": "draft", "draft_model": "simulated://x"}, "unsupported_combination"),
        ({**NGRAM, "source": "simulated://x"}, "unsupported_combination"),
        ({"quantization": "bf16", "kv_cache_dtype": "float32"}, "unsupported_combination"),
        ({"quantization": "int8", "kv_cache_dtype": "bfloat16"}, "unsupported_combination"),
        ({"disaggregation": "prefill-decode", "policy": "static"}, "unsupported_combination"),
        ({"disaggregation": "prefill-decode", "tensor_parallel": 2}, "unsupported_combination"),
        ({"guaranteed_percent": 101, "priority": "high"}, "out_of_range"),
        ({"guaranteed_percent": 40}, "unsupported_combination"),
        (
            {**GUARANTEED, "colocation": Colocation(isolation="dedicated")},
            "unsupported_combination",
        ),
        ({**GUARANTEED, "disaggregation": "prefill-decode"}, "unsupported_combination"),
        ({"engine": "sglang"}, "invalid_choice"),
        ({**VLLM, "source": "simulated://x"}, "unsupported_combination"),
        ({**VLLM, "quantization": "int8"}, "unsupported_combination"),
        ({**VLLM, "kv_cache_dtype": "int8"}, "unsupported_combination"),
        ({**VLLM, "policy": "static"}, "unsupported_combination"),
        ({**VLLM, "speculation": "ngram"}, "unsupported_combination"),
        ({**VLLM, "disaggregation": "prefill-decode"}, "unsupported_combination"),
        ({**VLLM, "swap_bytes": 1 << 20}, "unsupported_combination"),
        ({**VLLM, "residency": "swappable"}, "unsupported_combination"),
        ({**VLLM, **GUARANTEED}, "unsupported_combination"),
        ({**VLLM, "tensor_parallel": 2}, "unsupported_combination"),
        ({**GUARANTEED, "tensor_parallel": 2}, "unsupported_combination"),
        ({"swap_bytes": -1}, "out_of_range"),
        ({"swap_bytes": SPEC.gpu_memory}, "out_of_range"),
        ({"colocation": Colocation(isolation="air-gapped")}, "invalid_choice"),
        ({"gpu_memory": 0}, "out_of_range"),
        ({"gpu_memory": 2**60}, "out_of_range"),
        ({"tensor_parallel": 0}, "out_of_range"),
        ({"max_batch": -1}, "out_of_range"),
        ({"max_prompt_tokens": 2**31}, "out_of_range"),
        ({"max_output_tokens": 0}, "out_of_range"),
        ({"min_replicas": 3}, "out_of_range"),
        ({"min_replicas": -1}, "out_of_range"),
        ({"min_replicas": 0, "max_replicas": 0}, "out_of_range"),
        ({"max_replicas": 5000}, "out_of_range"),
        ({"source": "file:///" + "a" * 2041}, "invalid_source"),
        ({"sha256": "a" * 65}, "out_of_range"),
        ({"sha256": "a" * 63}, "out_of_range"),
        ({"sha256": "z" * 64}, "out_of_range"),
        ({"sha256": "zz"}, "out_of_range"),
        ({"sha256": "a" * 64 + "\n"}, "out_of_range"),
        ({"colocation": Colocation(labels=("",))}, "out_of_range"),
        ({"colocation": Colocation(affinity=("a" * 201,))}, "out_of_range"),
        ({"colocation": Colocation(anti_affinity=("a",) * 101)}, "out_of_range"),
        ({"needs": Needs(gpu_classes=("H100",) * 101)}, "out_of_range"),
        ({"needs": Needs(gpu_classes=("a" * 65,))}, "out_of_range"),
        ({"task": "paint"}, "invalid_choice"),
        ({"task": "embed"}, "unsupported_combination"),
        ({**EMBED, "quantization": "int8"}, "unsupported_combination"),
        ({**EMBED, "kv_cache_dtype": "float32"}, "unsupported_combination"),
        ({**EMBED, "speculation": "ngram"}, "unsupported_combination"),
        ({**EMBED, "disaggregation": "prefill-decode"}, "unsupported_combination"),
        ({**EMBED, "policy": "static"}, "unsupported_combination"),
        ({**EMBED, "swap_bytes": 1}, "unsupported_combination"),
        ({**EMBED, "tensor_parallel": 2}, "unsupported_combination"),
        ({"max_inputs": 0}, "out_of_range"),
        ({"max_inputs": 2049}, "out_of_range"),
    ],
)
def test_a_specification_that_breaks_a_rule_is_refused(change: dict[str, Any], code: str) -> None:
    given(REGISTERED).when(AddVersion(M, replace(SPEC, **change), 2.0)).then_refused(code)


@pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (1, 1025)])
def test_bounds_of_replicas_are_refused_in_a_sentence(bounds: tuple[int, int]) -> None:
    with pytest.raises(Invalid, match="max_replicas is from 1 to 1024, and min_replicas from 0"):
        check_replicas(*bounds)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"draft_model": ""}, "draft_model is needed with speculation: draft."),
        ({"speculation": "none"}, "draft_model goes with speculation: draft."),
    ],
)
def test_a_draft_model_and_its_speculation_need_each_other(
    change: dict[str, Any], told: str
) -> None:
    spec = replace(SPEC, speculation="draft", draft_model="hf://org/small@main")
    with pytest.raises(Invalid, match=f"^{told}$"):
        check_spec(replace(spec, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "prefill-first", **NGRAM, "swap_bytes": 0},
        {"speculation": "draft", "draft_model": "hf://org/small@main"},
        {"quantization": "int8-weight-only", "kv_cache_dtype": "int8"},
        {"quantization": "bf16", "kv_cache_dtype": "bfloat16"},
        {"quantization": "int8", "kv_cache_dtype": "float32"},
        {"disaggregation": "prefill-decode", "quantization": "awq-int4"},
        {"sha256": ""},
        {"sha256": "Ab" * 32},
        GUARANTEED,
        {**EMBED, "quantization": "bf16", "residency": "swappable", "max_inputs": 8},
    ],
)
def test_a_version_chooses_how_its_engine_works(change: dict[str, Any]) -> None:
    spec = replace(SPEC, **change)
    given(REGISTERED).when(AddVersion(M, spec, 2.0)).then(ModelVersionAdded(M, spec, 2.0))


def test_an_embedding_version_needs_no_room_for_output() -> None:
    assert SPEC.max_model_len == SPEC.max_prompt_tokens + SPEC.max_output_tokens
    assert replace(SPEC, **EMBED).max_model_len == SPEC.max_prompt_tokens


def test_scaling_changes_a_live_version() -> None:
    scaled = ModelVersionScaled(M, "v1", 0, 4, 3.0)
    given(REGISTERED, ADDED).when(ScaleVersion(M, "v1", 0, 4, 3.0)).then(scaled)
    given(REGISTERED, ADDED, scaled).when(ScaleVersion(M, "v1", 0, 4, 4.0)).then_nothing()
    given(REGISTERED, ADDED).when(ScaleVersion(M, "v1", 5, 4, 3.0)).then_refused("out_of_range")
    given(REGISTERED, ADDED).when(ScaleVersion(M, "v9", 1, 1, 3.0)).then_refused(
        "version_not_found"
    )
    given(REGISTERED, ADDED, RETIRED).when(ScaleVersion(M, "v1", 1, 1, 5.0)).then_refused(
        "version_retired"
    )


def test_retiring_is_for_good_and_harmless_to_repeat() -> None:
    given(REGISTERED, ADDED).when(RetireVersion(M, "v1", 4.0)).then(RETIRED)
    given(REGISTERED, ADDED, RETIRED).when(RetireVersion(M, "v1", 5.0)).then_nothing()
    given(REGISTERED).when(RetireVersion(M, "v1", 4.0)).then_refused("version_not_found")


def test_the_default_is_retired_last() -> None:
    """Else another version would become the default that nobody chose."""
    history = [REGISTERED, ADDED, ModelVersionAdded(M, replace(SPEC, version="v2"), 3.0)]
    given(*history).when(RetireVersion(M, "v1", 4.0)).then_refused("in_use")
    given(*history).when(RetireVersion(M, "v2", 4.0)).then(ModelVersionRetired(M, "v2", 4.0))
    chosen = ModelDefaultVersionSet(M, "v2", 3.0)
    given(*history, chosen).when(RetireVersion(M, "v1", 4.0)).then(RETIRED)
    given(*history, chosen).when(RetireVersion(M, "v2", 4.0)).then_refused("in_use")
    given(*history, chosen, RETIRED).when(RetireVersion(M, "v2", 4.0)).then(
        ModelVersionRetired(M, "v2", 4.0)
    )


def test_the_default_is_the_chosen_version_else_the_oldest_live_one() -> None:
    """So adding a version moves no traffic. A retired choice no longer counts; with nothing live
    there is no default."""
    chosen = ModelDefaultVersionSet(M, "v1", 4.0)
    given(REGISTERED, ADDED, ADDED2).when(SetDefaultVersion(M, "v1", 4.0)).then(chosen)
    given(REGISTERED, ADDED, chosen).when(SetDefaultVersion(M, "v1", 5.0)).then_nothing()
    given(REGISTERED, ADDED, RETIRED).when(SetDefaultVersion(M, "v1", 5.0)).then_refused(
        "version_retired"
    )
    history: list[Event] = [REGISTERED, ADDED, ADDED2]
    assert default_version(fold(model.DECIDER, history)) == "v1"
    newer = ModelDefaultVersionSet(M, "v2", 4.0)
    assert default_version(fold(model.DECIDER, [*history, newer])) == "v2"
    assert default_version(fold(model.DECIDER, [*history, chosen, RETIRED])) == "v2"
    assert default_version(fold(model.DECIDER, [REGISTERED, ADDED, RETIRED])) is None


def test_aliases_come_and_go() -> None:
    added = ModelAliasAdded(M, "small", 3.0)
    given(REGISTERED).when(AddAlias(M, "small", 3.0)).then(added)
    given(REGISTERED, added).when(AddAlias(M, "small", 4.0)).then_nothing()
    given(REGISTERED, added).when(RemoveAlias(M, "small", 4.0)).then(
        ModelAliasRemoved(M, "small", 4.0)
    )
    given(REGISTERED).when(RemoveAlias(M, "small", 4.0)).then_nothing()
    given(REGISTERED).when(AddAlias(M, "SMALL", 3.0)).then_refused("invalid_name")


def test_access_is_changed_as_a_whole() -> None:
    closed = Access(public=False, tenants=("acme",))
    changed = ModelAccessChanged(M, closed, 3.0)
    given(REGISTERED).when(ChangeAccess(M, closed, 3.0)).then(changed)
    given(REGISTERED, changed).when(ChangeAccess(M, closed, 4.0)).then_nothing()


def test_a_price_is_set_once_and_changed_as_often_as_one_likes() -> None:
    priced = ModelPriceSet(M, "v1", PRICE, 3.0)
    given(REGISTERED, ADDED).when(SetModelPrice(M, "v1", PRICE, 3.0)).then(priced)
    given(REGISTERED, ADDED, priced).when(SetModelPrice(M, "v1", PRICE, 4.0)).then_nothing()
    cheaper = Price(1, 1, 1)
    given(REGISTERED, ADDED, priced).when(SetModelPrice(M, "v1", cheaper, 5.0)).then(
        ModelPriceSet(M, "v1", cheaper, 5.0)
    )
    given(REGISTERED, ADDED).when(SetModelPrice(M, "v1", FREE, 3.0)).then_nothing()


def test_only_a_live_version_has_a_price_and_only_a_lawful_one() -> None:
    given(REGISTERED, ADDED).when(SetModelPrice(M, "v9", PRICE, 3.0)).then_refused(
        "version_not_found"
    )
    given(REGISTERED, ADDED, RETIRED).when(SetModelPrice(M, "v1", PRICE, 5.0)).then_refused(
        "version_retired"
    )
    given(REGISTERED, ADDED).when(SetModelPrice(M, "v1", Price(1, 2, 0), 3.0)).then_refused(
        "invalid_price"
    )


def test_each_version_has_its_own_price() -> None:
    """Version 2 costs nothing until somebody says what."""
    state = fold(model.DECIDER, [REGISTERED, ADDED, ADDED2, ModelPriceSet(M, "v1", PRICE, 4.0)])
    assert (price_of(state, "v1"), price_of(state, "v2")) == (PRICE, FREE)
