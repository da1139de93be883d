def test_a_full_queue_is_an_error_for_now(server, tiny):
    bias = {token: -100 for token in tiny.stop_ids}
    requests = server.worker.make_requests([[5, 6, 7]], samples=LIMIT, logit_bias=bias)

    async def fill() -> None:
        submission = Submission(requests)
        server.worker.submit(submission)
        try:
            with pytest.raises(QueueFull, match=f"got 1 answers .* at most {LIMIT} together; try again later"):
                server.worker.submit(Submission(requests[:1]))
        finally:
            server.worker.cancel(submission)
            assert await submission.pieces.get() is None

    asyncio.run(fill())


def test_a_key_is_checked():
    worker = SimpleNamespace(model=SimpleNamespace(names=("tiny",)), error=None, context=9)
    transport = httpx.ASGITransport(make_app(worker, Metrics(), key="secret"))

    async def ask(**headers: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.get("/v1/models", headers=headers)).status_code

    for header, status in {"Bearer secret": 200, "Bearer other": 401, "secret": 401, "Bearer ": 401}.items():
        assert asyncio.run(ask(Authorization=header)) == status
    assert asyncio.run(ask()) == 401


def test_random_bodies_are_refused_or_queued(server):
    """Bodies of the API's own schema: never an error of the server, and one line each."""

    def refuse(call) -> None:
        raise QueueFull("full")

    worker = SimpleNamespace(
        model=server.worker.model, error=None, make_requests=server.worker.make_requests, submit=refuse
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(worker, Metrics()))
    statuses = set()
    for path in ("/v1/chat/completions", "/v1/completions"):

        @hypothesis.settings(
            max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
        )
        @hypothesis.given(case=schema[path]["POST"].as_strategy(), has_chat=strategies.booleans())
        def check(case, has_chat: bool) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)
                case.body |= {"messages": CHAT, "prompt": "x"} if has_chat else {}
            response = case.call()
            message = response.json()["error"]["message"]
            assert response.status_code in (400, 429) and "\n" not in message, message
            statuses.add(response.status_code)

        check()
    assert statuses == {400, 429}
