"""Which endpoint a reference means, who may ask it, and where it cannot stand."""

import pytest

from engine.core.errors import UserError
from engine.endpoints.references import check_shared, find_endpoint
from engine.home.run_dir import Home
from engine.models import catalog

TABLES = """
[endpoints.mine]
url = "http://127.0.0.1:9/v1"
model = "m"
[endpoints.ours]
url = "http://127.0.0.1:9/v1"
model = "m"
shared = true
"""


def test_another_key_than_the_owners_may_ask_what_the_owner_shares(home: Home):
    home.config_file.write_text(TABLES)
    check_shared(home, "openai:ours")
    check_shared(home, "pebble")
    with pytest.raises(UserError, match="owner of this home alone") as caught:
        check_shared(home, " openai:mine")
    assert caught.value.code == "FORBIDDEN" and "shared = true" in str(caught.value.advice)


def test_a_name_that_the_owner_did_not_give_is_no_url_to_ask(home: Home):
    for ref in ("openai:http://127.0.0.1:9/v1", "openai:", "openai:mine"):
        with pytest.raises(UserError) as caught:
            find_endpoint(home, ref)
        assert caught.value.code == "MODEL_NOT_FOUND"


def test_what_needs_a_model_here_says_what_an_endpoint_is_for(home: Home):
    home.config_file.write_text(TABLES)
    with pytest.raises(UserError, match="can be asked, and is not loaded here") as caught:
        catalog.resolve_model(home, "openai:mine")
    assert caught.value.code == "MODEL_UNSUPPORTED"
