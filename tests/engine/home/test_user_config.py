"""Models behind a URL: what config.toml may say of them, and where their keys are looked for."""

import pytest

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.sanitize import redactor_for
from engine.home.user_config import Endpoint, key_of

WHOLE = """
[endpoints.big]
url = "https://api.example.com/v1/"
model = "big-1"
key_env = "BIG_KEY"
price_in = 2
price_out = 8.5
max_concurrency = 16
timeout_s = 30
context = 32000
shared = true

[endpoints.near]
url = "http://127.0.0.1:8000/v1"
model = "near-1"
"""


def test_endpoints_stand_in_tables_of_config_toml(home: Home):
    home.config_file.write_text("gpu_hour_price = 2\n" + WHOLE)
    config = home.user_config()
    assert config.gpu_hour_price == 2.0 and list(config.endpoints) == ["big", "near"]
    big, near = config.endpoints.values()
    assert big == Endpoint(
        "big",
        "https://api.example.com/v1",
        "big-1",
        "BIG_KEY",
        price_in=2.0,
        price_out=8.5,
        max_concurrency=16,
        timeout_s=30.0,
        context=32_000,
        shared=True,
    )
    assert str(big) == "big-1 at api.example.com"
    assert (near.key_env, near.price_in, near.shared) == ("", None, False)


@pytest.mark.parametrize(
    ("lines", "code", "field"),
    [
        ('key = "sk-abcdefghijklmnopqrstuvwxyz"', "SETTING_UNKNOWN", "key"),
        ('key_env = "sk-abcdefghijklmnopqrstuvwxyz"', "SETTING_INVALID", "key_env"),
        ('url = "ftp://h/v1"', "SETTING_INVALID", "url"),
        ('url = "https://me:sk-abcdefghijklmnopqrstuvwxyz@h/v1"', "SETTING_INVALID", "url"),
        ('url = "https://h/v1?k=sk-abcdefghijklmnopqrstuvwxyz"', "SETTING_INVALID", "url"),
        ('url = "https://["', "SETTING_INVALID", "url"),
        ('model = ""', "SETTING_INVALID", "model"),
        ("price_in = -1", "SETTING_INVALID", "price_in"),
        ("price_out = nan", "SETTING_INVALID", "price_out"),
        ("max_concurrency = 0", "SETTING_INVALID", "max_concurrency"),
        ("max_concurrency = 2.5", "SETTING_INVALID", "max_concurrency"),
        ("timeout_s = 0", "SETTING_INVALID", "timeout_s"),
        ("context = true", "SETTING_INVALID", "context"),
        ('shared = "yes"', "SETTING_INVALID", "shared"),
    ],
)
def test_a_wrong_table_is_refused_by_name_and_no_text_of_it_is_repeated(
    home: Home, lines: str, code: str, field: str
):
    needed = {"url": 'url = "http://h/v1"', "model": 'model = "m"'}
    needed.pop(field, None)
    home.config_file.write_text("[endpoints.x]\n" + "\n".join([*needed.values(), lines]))
    with pytest.raises(UserError) as caught:
        home.user_config()
    assert (caught.value.code, caught.value.field) == (code, f"endpoints.x.{field}")
    assert "sk-" not in f"{caught.value.message} {caught.value.advice}"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("endpoints = 3", "endpoints"),
        ("endpoints = {x = 3}", "endpoints.x"),
        ('[endpoints."a b"]\nurl = "http://h"', "endpoints.a b"),
        ('[endpoints.x]\nurl = "http://h/v1"', "endpoints.x.model"),
        ('[endpoints.x]\nmodel = "m"', "endpoints.x.url"),
    ],
)
def test_what_is_no_table_of_an_endpoint_is_refused(home: Home, text: str, field: str):
    home.config_file.write_text(text)
    with pytest.raises(UserError) as caught:
        home.user_config()
    assert (caught.value.code, caught.value.field) == ("SETTING_INVALID", field)


def test_a_key_is_a_variable_or_an_entry_of_a_file_dotenv(home: Home, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.delenv("BIG_KEY", raising=False)
    assert key_of(home.root, "BIG_KEY") == "" == key_of(home.root, "")
    (home.root / ".env").write_text("# mine\n\nexport BIG_KEY = 'of the home'\nOTHER=1\n")
    assert key_of(home.root, "BIG_KEY") == "of the home"
    (project / ".env").write_text('BIG_KEY="of the project"\n')
    assert key_of(home.root, "BIG_KEY") == "of the project"
    monkeypatch.setenv("BIG_KEY", "of the process")
    assert key_of(home.root, "BIG_KEY") == "of the process"


def test_the_keys_of_endpoints_are_hidden_wherever_text_is_shown(home: Home):
    home.config_file.write_text(WHOLE)
    (home.root / ".env").write_text("BIG_KEY=opensesame\n")
    assert redactor_for(home, None).text("it said opensesame") == "it said [secret BIG_KEY]"
    home.config_file.write_text("endpoints = 3")  # damaged: nothing to hide is known
    assert redactor_for(home, None).text("hello") == "hello"
