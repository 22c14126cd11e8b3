"""What a person can set, read or meet is written down, and the writing is up to date."""

import pytest

from tests.architecture.reference import ROOT, filled, sections


@pytest.mark.parametrize("readme", ["controlplane/README.md", "gpuagent/README.md"])
def test_the_reference_is_up_to_date(readme):
    """Settings, commands, metrics and events are as the code has them; else run the generator."""
    text = (ROOT / readme).read_text()
    assert filled(text, sections()[readme]) == text, "run python -m tests.architecture.reference"


@pytest.mark.parametrize("readme", ["controlplane/README.md", "gpuagent/README.md"])
def test_nothing_lacks_a_description(readme):
    """Every setting, command and metric says what it is."""
    for name, part in sections()[readme].items():
        bare = [line for line in part.splitlines() if "MISSING" in line]
        assert bare == [], name
