"""What a run with open places makes for those who join it, and the command that it tells them."""

import stat
from pathlib import Path

import pytest

from shoal.launch.invitation import join_hint, with_credentials
from shoal.launch.join import Access


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_a_run_on_this_host_gets_a_token_that_only_its_user_can_read(tmp_path):
    given = with_credentials(Access(), tmp_path)
    assert modes(tmp_path) == {"token": 0o600}
    assert len(Path(given.token_file).read_text()) == 64
    assert join_hint(Access(), given) == f"--token-file {tmp_path}/token"


def test_a_token_of_the_user_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_TOKEN", "s" * 32)
    given = with_credentials(Access(), tmp_path)
    assert Path(given.token_file).read_text() == "s" * 32
    assert join_hint(Access(), given) == "  # with the same SHOAL_TOKEN"
    own = tmp_path / "own"
    own.write_text("o" * 32)
    own.chmod(0o600)
    asked = Access(token_file=str(own))
    assert with_credentials(asked, tmp_path) == asked
    assert join_hint(asked, asked) == f"--token-file {own}"


def test_for_other_hosts_it_makes_certificates(tmp_path):
    pytest.importorskip("cryptography")
    asked = Access(listen="10.0.0.1:7000")
    given = with_credentials(asked, tmp_path)
    assert set(modes(tmp_path).values()) == {0o600}
    assert "BEGIN CERTIFICATE" in Path(given.authority).read_text()
    hint = f"--token-file {tmp_path}/token --authority {tmp_path}/authority.pem"
    assert join_hint(asked, given) == f"{hint}  # copy these files there; they are secret"


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "somewhere:7000"])
def test_not_for_a_host_that_it_does_not_know_the_address_of(tmp_path, listen):
    pytest.importorskip("cryptography")
    with pytest.raises(ValueError, match="makes certificates for addresses in digits"):
        with_credentials(Access(listen=listen), tmp_path)


def test_without_certificates_if_the_user_says_so(tmp_path):
    asked = Access(listen="10.0.0.1:7000", insecure=True)
    given = with_credentials(asked, tmp_path)
    assert given.certificate is None
    assert "--insecure" in join_hint(asked, given)
