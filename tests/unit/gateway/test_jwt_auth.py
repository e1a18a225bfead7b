from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from services.common.clock import ManualClock
from services.common.errors import ConfigError, RequestError
from services.gateway.auth import AuthConfig, Authenticator
from services.gateway.jwt_auth import JwtSettings, JwtVerifier, read_jwks
from services.gateway.keys import create_key
from services.gateway.namespaces import Namespaces, random_secret

ISSUER, AUDIENCE = "https://id.example", "isthmus"
NOW_S = 1_700_000_000
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_EC_KEY = ec.generate_private_key(ec.SECP256R1())
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def ec_jwk(key: ec.EllipticCurvePrivateKey, kid: str) -> dict[str, Any]:
    return {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())), "kid": kid}


def jwks(*more: dict[str, Any]) -> str:
    rsa_jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA_KEY.public_key()))
    ed_jwk = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(ED_KEY.public_key()))
    keys = [ec_jwk(EC_KEY, "ec"), {**rsa_jwk, "kid": "rsa"}, {**ed_jwk, "kid": "ed"}, *more]
    return json.dumps({"keys": keys})


def claims(**changes: Any) -> dict[str, Any]:
    found = {
        "iss": ISSUER, "aud": AUDIENCE, "exp": NOW_S + 600, "sub": "someone", "tenant": "acme",
        "scope": "openid inference", **changes,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def token(kid: str = "ec", key: Any = EC_KEY, algorithm: str = "ES256", **changes: Any) -> str:
    return jwt.encode(claims(**changes), key, algorithm, headers={"kid": kid})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(unix_ms=NOW_S * 1000)


@pytest.fixture
def verifier(tmp_path: Path, clock: ManualClock) -> JwtVerifier:
    path = tmp_path / "jwks.json"
    path.write_text(jwks())
    return JwtVerifier(JwtSettings(path, ISSUER, AUDIENCE, ("RS256", "ES256", "EdDSA")), clock)


def test_good_tokens_name_tenant_and_scopes(verifier: JwtVerifier) -> None:
    for text in (token(), token("rsa", RSA_KEY, "RS256"), token("ed", ED_KEY, "EdDSA")):
        found = verifier.verify(text)
        assert (found.tenant, found.subject) == ("acme", "someone")
        assert found.scopes == {"inference"}
    assert verifier.verify(token(scope=None)).scopes == set()
    assert verifier.verify(token(scope="admin monitor")).scopes == {"admin", "monitor"}
    assert verifier.verify(token(aud=["x", AUDIENCE])).tenant == "acme"


def unsigned() -> str:
    return jwt.encode(claims(), "", "none", headers={"kid": "ec"})


def signed_with_a_shared_secret() -> str:
    return jwt.encode(claims(), "k" * 64, "HS256", headers={"kid": "ec"})


BAD: dict[str, Callable[[], str]] = {
    "unsigned": unsigned,
    "shared secret": signed_with_a_shared_secret,
    "another key": lambda: token(key=OTHER_EC_KEY),
    "unknown key id": lambda: token("nobody"),
    "no key id": lambda: jwt.encode(claims(), EC_KEY, "ES256"),
    "algorithm not allowed": lambda: token("rsa", RSA_KEY, "RS512"),
    "algorithm of another key type": lambda: token("ec", RSA_KEY, "RS256"),
    "expired": lambda: token(exp=NOW_S - 31),
    "no expiry": lambda: token(exp=None),
    "not yet": lambda: token(nbf=NOW_S + 31),
    "other issuer": lambda: token(iss="https://evil.example"),
    "no issuer": lambda: token(iss=None),
    "other audience": lambda: token(aud="other"),
    "no audience": lambda: token(aud=None),
    "no tenant": lambda: token(tenant=None),
    "odd tenant": lambda: token(tenant="a/../b"),
    "tenant is no text": lambda: token(tenant=["acme"]),
    "infinite expiry": lambda: token(exp=1e300),
    "changed claims": lambda: _swap_payload(token(), token(tenant="victim")),
    "cut off": lambda: token()[:-5],
    "no base64": lambda: "eyJ!!.eyJ!!.!!",
}


def _swap_payload(first: str, second: str) -> str:
    head, _, signature = first.split(".")
    return f"{head}.{second.split('.')[1]}.{signature}"


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens_are_unauthenticated(verifier: JwtVerifier, name: str) -> None:
    text = BAD[name]()
    for _ in range(2):  # nothing bad is remembered as good
        with pytest.raises(RequestError) as caught:
            verifier.verify(text)
        assert caught.value.spec.code == "unauthenticated"
        assert text not in caught.value.message


def test_a_remembered_token_still_ends_at_its_time(
    verifier: JwtVerifier, clock: ManualClock
) -> None:
    text = token(exp=NOW_S + 10)
    verifier.verify(text)
    clock.advance(39.9)
    verifier.verify(text)
    clock.advance(0.2)
    with pytest.raises(RequestError, match="expired"):
        verifier.verify(text)


def test_a_key_taken_out_ends_the_tokens_it_signed(
    verifier: JwtVerifier, tmp_path: Path, clock: ManualClock
) -> None:
    text = token()
    verifier.verify(text)
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [ec_jwk(OTHER_EC_KEY, "new")]}))
    clock.advance(1.0)
    with pytest.raises(RequestError, match="unknown key"):
        verifier.verify(text)
    assert verifier.verify(token("new", OTHER_EC_KEY)).tenant == "acme"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not a set"),
        ("[]", "not a set"),
        ('{"keys": []}', "1 to 64"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "only RSA, EC and OKP"),
        ('{"keys": [{"kty": "EC", "d": "x"}]}', "private key"),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "x": "!", "y": "!"}]}', "not a set"),
    ],
)
def test_wrong_key_sets_are_refused(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=why):
        read_jwks(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jwks(tmp_path / "none")


def test_keys_of_one_set_need_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(jwks(ec_jwk(OTHER_EC_KEY, "ec")))
    with pytest.raises(ConfigError, match="different"):
        read_jwks(path)


def test_tokens_and_keys_are_taken_side_by_side(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "jwks.json").write_text(jwks())
    key, _ = create_key(tmp_path / "keys.json", "keyed", "", 0)
    settings = JwtSettings(tmp_path / "jwks.json", ISSUER, AUDIENCE)
    names = Namespaces(random_secret())
    both = Authenticator(AuthConfig(tmp_path / "keys.json", settings), names, clock)
    by_token = both.authenticate({"authorization": f"Bearer {token()}"})
    assert (by_token.tenant, by_token.key_id) == ("acme", "jwt:someone")
    assert by_token.namespace == names.of("acme")
    assert both.authenticate({"x-api-key": key}).tenant == "keyed"
    only = Authenticator(AuthConfig(jwt=settings), names, clock)
    assert only.authenticate({"authorization": f"Bearer {token()}"}).tenant == "acme"
    for headers in ({}, {"x-api-key": key}):
        with pytest.raises(RequestError):
            only.authenticate(headers)
