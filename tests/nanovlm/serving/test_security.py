"""Who may use the server: host names, origins and keys."""

from nanovlm.serving.options import ServerOptions
from support.serving import RunningServer, http, user_message


def test_foreign_web_pages_cannot_use_a_local_server(embedded):
    with RunningServer(embedded) as server:

        def status(**headers):
            return http.get(f"{server.url}/v1/models", headers=headers).status_code

        port = server.url.rpartition(":")[2]
        assert status() == status(host=f"localhost:{port}") == status(origin=server.url) == 200
        assert status(host=f"[::1]:{port}") == status(host="LOCALHOST") == 200
        assert status(host="evil.example") == status(host=f"evil.example:{port}") == 403
        assert status(host="127.0.0.1.evil.example") == status(host="[") == status(host="") == 403
        assert status(origin="https://evil.example") == status(origin="null") == 403
        assert status(origin=f"http://localhost:{port}") == 403, "another origin, though on the same machine"
        # Browsers send it without a preflight.
        simple = {"origin": "https://evil.example", "content-type": "text/plain"}
        refused = server.post({"model": "nanovlm", "messages": user_message("?")}, headers=simple)
        assert refused.status_code == 403 and "evil.example" in refused.json()["error"]["message"]
        preflight = http.options(f"{server.url}/v1/chat/completions", headers={"origin": "https://evil.example"})
        assert preflight.status_code == 403
        assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_key_is_required_where_one_is_set(embedded):
    with RunningServer(embedded, options=ServerOptions(api_key="schlüssel")) as server:
        for header in (None, "Bearer wrong", "schlüssel", "Basic schlüssel", "Bearer"):
            headers = {} if header is None else {"authorization": header.encode("utf-8")}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
                response = http.request(method, server.url + path, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            good = {"authorization": f"{scheme} schlüssel".encode()}
            assert http.get(f"{server.url}/v1/models", headers=good).status_code == 200
        assert http.get(f"{server.url}/health").status_code == http.get(server.url).status_code == 200


def test_allowed_origins_may_use_the_server_from_a_browser(embedded):
    front_end = "http://localhost:3000"
    options = ServerOptions(api_key="secret", allow_origin=(front_end,))
    body = {"messages": user_message("?"), "max_tokens": 2}
    with RunningServer(embedded, options=options) as server:

        def preflight(origin):
            asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            return http.options(f"{server.url}/v1/chat/completions", headers={"origin": origin} | asked)

        allowed = preflight(front_end)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == front_end
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        with_key = {"origin": front_end, "authorization": "Bearer secret"}
        for headers, status in ((with_key, 200), ({"origin": front_end}, 401)):
            response = server.post(body, headers=headers)
            assert response.status_code == status, "CORS is no key"
            assert response.headers["access-control-allow-origin"] == front_end, "pages may read errors, too"
        for origin in ("https://evil.example", "http://localhost:3001", "null"):
            assert preflight(origin).status_code == 403 and "--allow-origin" in preflight(origin).text
            assert server.post(body, headers=with_key | {"origin": origin}).status_code == 403
        assert server.post(body, headers=with_key | {"host": "evil.example"}).status_code == 403
    with RunningServer(embedded, options=ServerOptions(allow_origin=("*",))) as server:
        response = server.post(body, headers={"origin": "https://anywhere.example"})
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
