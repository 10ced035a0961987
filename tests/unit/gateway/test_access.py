"""API keys, tenants and the rules of roles."""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, hmac
from sealmesh.gateway.access.identity import OPERATION_ROLES, Authenticator, Principal
from sealmesh.gateway.access.keys import (
    ROLES,
    ApiKey,
    KeyFileError,
    KeySet,
    add_api_key,
    new_api_key,
    parse_key_file,
    read_key_file,
    write_key_file,
)
from sealmesh.gateway.access.tenants import (
    SecretFileError,
    TenantDeriver,
    create_secret_file,
    read_secret_file,
)
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.errors import SealmeshError

NOW = datetime(2026, 11, 5, 10, 0, tzinfo=UTC)
GOOD_KEY = """
[[key]]
prefix = "sk-sealmesh-abcdefgh"
sha256 = "%s"
tenant = "acme"
role = "app"
created = 2026-11-05T10:00:00Z
""" % ("0" * 64)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestKeys:
    def test_form_and_entropy(self) -> None:
        secrets = {new_api_key("acme")[0] for _ in range(50)}
        assert len(secrets) == 50
        for secret in secrets:
            assert secret.startswith("sk-sealmesh-")
            assert len(secret) == 12 + 8 + 43
            assert secret.isascii()

    def test_the_file_holds_no_secret(self, tmp_path: Path) -> None:
        path = tmp_path / "access" / "keys.toml"
        secret = add_api_key(path, "acme")
        text = path.read_text()
        assert secret[20:] not in text
        assert secret[:20] in text
        assert hashlib.sha256(secret.encode()).hexdigest() in text
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert list(path.parent.iterdir()) == [path]

    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        _, first = new_api_key("acme", "operator", now=NOW)
        _, second = new_api_key("globex", now=NOW, expires=NOW + timedelta(days=1))
        key_set = KeySet({first.prefix: first, second.prefix: second}, {"acme": 3})
        write_key_file(path, key_set)
        assert read_key_file(path) == key_set
        assert read_key_file(path).epoch("acme") == 3
        assert read_key_file(path).epoch("globex") == 1

    def test_adding_keeps_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        one, two = add_api_key(path, "acme"), add_api_key(path, "globex")
        keys = read_key_file(path)
        first, second = keys.find(one, NOW), keys.find(two, NOW)
        assert first is not None
        assert second is not None
        assert (first.tenant, second.tenant) == ("acme", "globex")

    def test_find(self) -> None:
        secret, key = new_api_key("acme", now=NOW, expires=NOW + timedelta(seconds=1))
        keys = KeySet({key.prefix: key}, {})
        assert keys.find(secret, NOW) is key
        assert keys.find(secret, NOW + timedelta(seconds=1)) is None
        for wrong in (secret[:-1], secret + "x", secret[:-1] + "~", secret.upper(), key.prefix, "", "\ud800"):
            assert keys.find(wrong, NOW) is None

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("", "version must be 1"),
            ("version = 2", "version must be 1"),
            ("version = 1\nextra = 1", "unknown setting 'extra'"),
            ("version = ", "not valid TOML"),
            ("version = 1\n[key]\nprefix = 'x'", "written as [[key]]"),
            ("version = 1" + GOOD_KEY.replace("abcdefgh", "short"), "key 0: prefix must be"),
            ("version = 1" + GOOD_KEY.replace("0" * 64, "F" * 64), "64 lower-case hex"),
            ("version = 1" + GOOD_KEY.replace('"app"', '"root"'), "role must be one of"),
            ("version = 1" + GOOD_KEY.replace('"acme"', '"A b"'), "tenant must be of"),
            ("version = 1" + GOOD_KEY.replace("00Z", "00"), "times with a zone"),
            ("version = 1" + GOOD_KEY + "secret = 'x'", "unknown setting 'secret'"),
            ("version = 1" + GOOD_KEY + GOOD_KEY, "key 1: prefix sk-sealmesh-abcdefgh is there twice"),
            ("version = 1\n[[tenant]]\nname = 'a'\nepoch = 0", "epoch must be 1 or more"),
            ("version = 1\n[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", "tenant 1: name must be unique"),
        ],
    )
    def test_faults_name_their_place(self, text: str, fault: str) -> None:
        with pytest.raises(KeyFileError) as caught:
            parse_key_file(text.encode(), "keys.toml")
        assert str(caught.value).startswith("keys.toml: ")
        assert fault in str(caught.value)

    def test_a_file_that_others_may_write_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        add_api_key(path, "acme")
        path.chmod(0o620)
        with pytest.raises(KeyFileError, match="others may write"):
            read_key_file(path)

    @pytest.mark.parametrize(
        ("tenant", "role"), [("Acme", "app"), ("", "app"), ("a" * 64, "app"), ("acme", "god")]
    )
    def test_names_are_checked(self, tenant: str, role: str) -> None:
        with pytest.raises(KeyFileError):
            new_api_key(tenant, role)


class TestTenants:
    def test_derivation_is_hmac_sm3_with_separated_domains(self) -> None:
        secret = bytes(range(32))
        context = TenantDeriver(secret).context("acme", 2)
        mac = hmac.HMAC(secret, hashes.SM3())
        label = b"sealmesh/gateway/tenant-handle/v1"
        mac.update(len(label).to_bytes(4, "big") + label + b"\0\0\0\4acme" + (2).to_bytes(8, "big"))
        assert context.handle == mac.finalize()[:16].hex()
        assert context.epoch == 2

    def test_everything_differs_between_tenants_epochs_secrets_and_purposes(self) -> None:
        seen: set[str] = set()
        count = 0
        for secret in (b"a" * 32, b"b" * 32):
            deriver = TenantDeriver(secret)
            for tenant in ("acme", "acme1", "acm"):
                for epoch in (1, 2):
                    context = deriver.context(tenant, epoch)
                    seen |= {context.handle, context.cache_salt, deriver.pii_key(tenant, epoch).hex()}
                    count += 3
        assert len(seen) == count

    def test_equal_over_gateways(self) -> None:
        one, two = TenantDeriver(b"s" * 32), TenantDeriver(b"s" * 32)
        assert one.context("acme", 1) == two.context("acme", 1)

    def test_secret_file(self, tmp_path: Path) -> None:
        path = tmp_path / "keys" / "gateway.secret"
        create_secret_file(path)
        secret = read_secret_file(path)
        assert len(secret) == 32
        create_secret_file(path)  # never replaces one that is there
        assert read_secret_file(path) == secret
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("content", ["", "zz", "ab", "ab" * 31, "ab" * 33, "é" * 32])
    def test_bad_secret_files(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "secret"
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(SecretFileError, match="64 hex characters"):
            read_secret_file(path)

    def test_a_secret_that_others_may_read_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "secret"
        create_secret_file(path)
        path.chmod(0o640)
        with pytest.raises(SecretFileError, match="chmod 600"):
            read_secret_file(path)
        with pytest.raises(SecretFileError, match="No such file"):
            read_secret_file(tmp_path / "none")


class TestAuthenticator:
    async def make(self, path: Path) -> tuple[Authenticator, Clock]:
        clock = Clock()
        secret_file = path.with_name("secret")
        create_secret_file(secret_file)
        authenticator = Authenticator(path, secret_file, StructuredLogger("test"), monotonic=clock)
        await authenticator.start()
        return authenticator, clock

    async def test_accepts_a_key(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        secret = add_api_key(path, "acme", "operator")
        authenticator, _ = await self.make(path)
        principal = authenticator.authenticate(f"Bearer {secret}")
        assert (principal.tenant, principal.role) == ("acme", "operator")
        assert principal.key_prefix == secret[:20]
        assert authenticator.authenticate(f"bearer   {secret} ") is principal

    @pytest.mark.parametrize(
        "header", [None, "", "Bearer", "Bearer ", "Basic abc", "sk-sealmesh-x", "Bearer wrong"]
    )
    async def test_refuses_the_rest(self, tmp_path: Path, header: str | None) -> None:
        path = tmp_path / "keys.toml"
        add_api_key(path, "acme")
        authenticator, _ = await self.make(path)
        with pytest.raises(SealmeshError) as caught:
            authenticator.authenticate(header)
        assert caught.value.reason == "CREDENTIAL_INVALID"
        assert caught.value.http_status == 401

    async def test_follows_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        first = add_api_key(path, "acme")
        authenticator, clock = await self.make(path)
        second = add_api_key(path, "acme")
        clock.now += 1
        authenticator.authenticate(f"Bearer {second}")
        keys = read_key_file(path)
        kept = {prefix: key for prefix, key in keys.keys.items() if prefix != first[:20]}
        write_key_file(path, KeySet(kept, {"acme": 2}))
        clock.now += 1
        assert authenticator.authenticate(f"Bearer {second}").context.epoch == 2
        with pytest.raises(SealmeshError):
            authenticator.authenticate(f"Bearer {first}")

    @pytest.mark.parametrize("how", ["broken", "gone", "writable"])
    async def test_a_file_that_cannot_be_used_lets_nobody_in(self, tmp_path: Path, how: str) -> None:
        path = tmp_path / "keys.toml"
        secret = add_api_key(path, "acme")
        good = path.read_bytes()
        authenticator, clock = await self.make(path)
        if how == "gone":
            path.unlink()
        elif how == "broken":
            path.write_text("version = ")
        else:
            path.write_bytes(good + b"\n")
            path.chmod(0o666)
        clock.now += 1
        with pytest.raises(SealmeshError) as caught:
            authenticator.authenticate(f"Bearer {secret}")
        assert caught.value.http_status == 503
        path.unlink(missing_ok=True)
        path.write_bytes(good)
        path.chmod(0o600)
        clock.now += 1
        assert authenticator.authenticate(f"Bearer {secret}").tenant == "acme"

    async def test_an_expired_key_that_was_used_before(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        now = [NOW]
        secret = add_api_key(path, "acme", expires=NOW + timedelta(hours=1))
        create_secret_file(tmp_path / "secret")
        authenticator = Authenticator(path, tmp_path / "secret", StructuredLogger("test"), now=lambda: now[0])
        await authenticator.start()
        authenticator.authenticate(f"Bearer {secret}")
        now[0] += timedelta(hours=2)
        with pytest.raises(SealmeshError):
            authenticator.authenticate(f"Bearer {secret}")

    async def test_start_says_what_is_wrong(self, tmp_path: Path) -> None:
        with pytest.raises(SealmeshError, match=r"access_keys_file: .*none.toml: No such file"):
            await self.make(tmp_path / "none.toml")

    async def test_looking_costs_one_stat_at_most_twice_a_second(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "keys.toml"
        secret = add_api_key(path, "acme")
        authenticator, clock = await self.make(path)
        looked = 0
        real = os.stat

        def counting(*args: object, **kwargs: object) -> os.stat_result:
            nonlocal looked
            looked += 1
            return real(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "stat", counting)
        for _ in range(100):
            clock.now += 0.01
            authenticator.authenticate(f"Bearer {secret}")
        monkeypatch.undo()
        assert looked <= 3


def test_roles_are_refused_by_default() -> None:
    context = TenantDeriver(b"s" * 32).context("acme", 1)

    def allowed(role: str) -> set[str]:
        principal = Principal("sk-sealmesh-abcdefgh", "acme", role, context, b"k" * 32)
        found = set()
        for operation in (*OPERATION_ROLES, "", "admin.erase"):
            with contextlib.suppress(SealmeshError):
                principal.require(operation)
                found.add(operation)
        return found

    assert {role: sorted(allowed(role)) for role in ROLES} == {
        "user": ["infer", "models.read", "text.mask"],
        "app": ["infer", "models.read", "text.mask"],
        "operator": ["infer", "models.read", "text.mask"],
        "system": ["models.read"],
        "security": ["models.read", "text.mask"],
        "audit": ["models.read"],
    }


def test_records_are_values() -> None:
    key = ApiKey("sk-sealmesh-abcdefgh", "0" * 64, "acme", "app", NOW)
    assert parse_key_file(b"version = 1" + GOOD_KEY.encode()).keys == {key.prefix: key}
