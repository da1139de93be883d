"""Who may call the server (hosts, keys, origins), and the names of its model; with a worker without a model."""

import asyncio
from typing import Any

import httpx
from stub_worker import client_of, message, stub_worker


def test_other_hosts_are_refused():
    async def run() -> None:
        async with client_of(stub_worker(), hosts={"localhost", "[::1]"}) as http:
            for host, status in {
                "localhost": 200,
                "LOCALHOST:81": 200,
                "[::1]:9": 200,
                "evil.example": 403,
                "[::2]": 403,
            }.items():
                response = await http.get("/health", headers={"host": host})
                assert response.status_code == status, host
            assert "got Host '[::2]', expected one of [::1], localhost" in message(response)
        async with client_of(stub_worker()) as http:
            assert (await http.get("/health", headers={"host": "any.example"})).status_code == 200

    asyncio.run(run())


def test_the_id_of_a_model_is_no_path(tmp_path):
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    worker = stub_worker()
    worker.model.names = (str(folder), "none")

    async def run() -> None:
        async with client_of(worker) as http:
            [card] = (await http.get("/v1/models")).json()["data"]
            assert card["id"] == "Qwen3-4B"
            for name, status in {"Qwen3-4B": 200, str(folder): 200, "tiny": 404}.items():
                response = await http.post("/v1/completions", json={"prompt": "a", "model": name})
                assert response.status_code == status
            assert str(tmp_path) not in response.text

    asyncio.run(run())


def test_a_key_is_checked():
    """For all but /health, whose answer says nothing."""

    async def run() -> None:
        async with client_of(stub_worker(), key="secret") as http:
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                for header, status in {"Bearer secret": 200, "Bearer other": 401, "secret": 401, "Bearer ": 401}.items():
                    assert (await http.get(path, headers={"authorization": header})).status_code == status
                assert (await http.get(path)).status_code == 401
            assert (await http.get("/health")).status_code == 200

    asyncio.run(run())


def test_other_pages_may_call_if_their_origin_is_allowed():
    async def preflight(**options: Any) -> httpx.Headers:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        async with client_of(stub_worker(), **options) as http:
            return (await http.options("/v1/chat/completions", headers=headers)).headers

    assert "access-control-allow-origin" not in asyncio.run(preflight())
    assert "access-control-allow-origin" not in asyncio.run(preflight(origins=["https://b.example"]))
    for origins in ["https://a.example", "https://b.example"], ["*"]:
        assert asyncio.run(preflight(origins=origins))["access-control-allow-origin"] in (origins[0], "https://a.example")


def test_a_model_has_the_names_that_it_was_given():
    async def name_of(model: str) -> tuple[int, str]:
        async with client_of(stub_worker(), names=["large", "small"]) as http:
            assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["large", "small"]
            response = await http.post("/v1/completions", json={"prompt": "a", "model": model})
            return response.status_code, response.json().get("model")

    assert [asyncio.run(name_of(model)) for model in ("small", "tiny", "x")] == [
        (200, "large"),
        (200, "large"),
        (404, None),
    ]


def test_keys_are_bearers_or_x_api_key():
    async def status(**headers: str) -> int:
        async with client_of(stub_worker(), key="secret") as http:
            return (await http.get("/v1/models", headers=headers)).status_code

    given = [
        {"authorization": "Bearer secret"},
        {"x-api-key": "secret"},
        {"authorization": "Bearer none", "x-api-key": "secret"},
        {"x-api-key": "no"},
        {"authorization": "secret"},
        {},
    ]
    assert [asyncio.run(status(**headers)) for headers in given] == [200, 200, 200, 401, 401, 401]
