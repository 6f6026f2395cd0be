"""The explorer: its answers against the Python API, its server against bad requests."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from helpers import ROOT, randomize, to_numpy
from helpers import check_one_line_error as fails

import keras_tinygpt as tg
from keras_tinygpt import inspection
from keras_tinygpt.explorer import pages
from keras_tinygpt.explorer.answers import Explorer
from keras_tinygpt.explorer.command import warm_up
from keras_tinygpt.explorer.server import MOST_BYTES, QUESTIONS, ExplorerServer
from keras_tinygpt.explorer.views import DIGITS, WEIGHT_UNIT
from keras_tinygpt.generation import SamplingConfig

T = 7
TEXT = "abca"
CLOSE = {"atol": 0.6 * 10**-DIGITS}


def make(window=T, **changes):
    """A language model of the characters a to k with random weights."""
    tokenizer = tg.CharTokenizer("abcdefghijk")
    fields = {"num_layers": 2, "num_heads": 3, "hidden_dim": 12, **changes}
    model = tg.build_gpt(tg.GPTConfig(tokenizer.vocab_size, window, **fields))
    return tg.LanguageModel(randomize(model), tokenizer)


def make_lstm():
    tokenizer = tg.CharTokenizer("abcdefghijk")
    config = tg.LSTMConfig(tokenizer.vocab_size, 13, embedding_dim=5)
    return tg.LanguageModel(randomize(tg.build_lstm(config)), tokenizer)


@pytest.fixture(scope="module")
def explorer():
    return Explorer(make(), "small", TEXT)


@pytest.fixture(scope="module")
def server(explorer):
    server = ExplorerServer(explorer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def full_maps(view, length):
    """The maps (L, N, T, T) from rows without their masked part."""
    units = [
        [[row + [0] * (length - len(row)) for row in head] for head in block]
        for block in view["weights"]
    ]
    return WEIGHT_UNIT * np.array(units)


def check_view(lm, view, text):
    """A view is what the Python API says of the text."""
    ids = lm.tokenizer.encode(text)
    assert view["ids"] == ids.tolist() and view["tokens"] == list(text)
    assert view["surprise"][0] is None
    nats = inspection.surprise(lm.model, ids)
    np.testing.assert_allclose(view["surprise"][1:], nats, **CLOSE)
    maps = inspection.attention_maps(lm.model, ids).weights
    np.testing.assert_allclose(full_maps(view, len(ids)), maps, **CLOSE)
    longer = lm.model.config.max_sequence_length
    if len(ids) + 1 == longer:
        metrics = inspection.head_metrics(
            lm.model, [*ids, 0], sequence_length=len(ids), max_windows=1
        )
        for name in ("distance", "entropy", "entropy_share", "previous", "first"):
            np.testing.assert_allclose(
                view["metrics"][name], getattr(metrics, name), **CLOSE
            )


@pytest.mark.backend
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "rotary", "normalization": "rms", "num_kv_heads": 1},
        {"positions": "alibi", "norm_position": "post", "tie_embeddings": True},
        {"positions": "sinusoidal", "attention_window": 3},
    ],
)
def test_a_view_says_what_the_python_api_says(changes):
    lm = make(**changes)
    check_view(lm, Explorer(lm, "small", TEXT).read(text="abcdea"), "abcdea")


def test_one_token(explorer):
    view = explorer.read(text="c")
    assert view["weights"] == [[[[100_000]]] * 3] * 2
    assert view["metrics"] is None and view["surprise"] == [None]


def test_long_texts_are_read_from_their_last_window(explorer):
    view = explorer.read(text="kjihgfedcba")
    assert view["start"] == 4 and "".join(view["tokens"]) == "gfedcba"
    assert view["text"] == "kjihgfedcba" and len(view["ids"]) == 11
    last = explorer.read(text="gfedcba")
    assert last["weights"] == view["weights"]
    assert last["surprise"] == view["surprise"]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.9},
    ],
)
def test_candidates_say_what_next_tokens_says(explorer, settings):
    ids = explorer.tokenizer.encode("abcde")
    for position in (4, 1):
        answer = explorer.position(ids.tolist(), position, **settings)
        found = inspection.next_tokens(
            explorer.model, ids[: position + 1], SamplingConfig(**settings), count=12
        )
        assert len(answer["candidates"]) == len(found) == 11
        for row, candidate in zip(answer["candidates"], found, strict=True):
            assert row["token"] == candidate.token
            assert row["text"] == "abcdefghijk"[candidate.token]
            assert row["whole"] == row["probability"]
            np.testing.assert_allclose(
                [row["probability"], row["chance"]],
                [candidate.probability, candidate.chance],
                **CLOSE,
            )


def test_stages_end_in_the_prediction(explorer):
    ids = explorer.tokenizer.encode("abcde").tolist()
    answer = explorer.position(ids, 2)
    names = [(stage["block"], stage["part"]) for stage in answer["stages"]]
    parts = ("attention", "feed-forward")
    assert names == [(None, "embedding"), *[(b, p) for b in (0, 1) for p in parts]]
    trace = inspection.Tracer(explorer.model).trace(ids)
    for stage, hidden in zip(answer["stages"], trace.hidden[:, 2], strict=True):
        assert stage["length"] == pytest.approx(np.linalg.norm(hidden), abs=1e-4)
    change = np.linalg.norm(trace.hidden[3, 2] - trace.hidden[2, 2])
    assert answer["stages"][3]["change"] == pytest.approx(change, abs=1e-4)
    for guess, row in zip(
        answer["stages"][-1]["guesses"], answer["candidates"], strict=False
    ):
        assert guess["text"] == row["text"]
        assert guess["probability"] == pytest.approx(row["probability"], abs=2e-5)


@pytest.mark.backend
def test_heads_switched_off(explorer):
    ids = explorer.tokenizer.encode("abcde").tolist()
    answer = explorer.position(ids, 4, without=[[1, 2], [0, 1], [1, 2]])
    trace = inspection.Tracer(explorer.model).trace(ids, without=[(0, 1), (1, 2)])
    masses = np.exp(trace.logits[4].astype("float64"))
    whole = {row["token"]: row for row in explorer.position(ids, 4)["candidates"]}
    for row in answer["candidates"]:
        expected = masses[row["token"]] / masses.sum()
        assert row["probability"] == pytest.approx(expected, abs=1e-5)
        assert row["whole"] == whole[row["token"]]["probability"]
    assert any(row["whole"] != row["probability"] for row in answer["candidates"])
    view = explorer.read(ids=ids, without=[[1, 2], [0, 1]])
    assert view["without"] == [[0, 1], [1, 2]]
    np.testing.assert_allclose(full_maps(view, 5), trace.weights, **CLOSE)


def written(explorer, *arguments, **settings):
    pieces = list(explorer.write(*arguments, **settings))
    ids = [token for piece in pieces for token in piece["ids"]]
    assert "".join(piece["text"] for piece in pieces) == explorer.tokenizer.decode(ids)
    return ids


def plain(lm, ids, count, **settings):
    """The new tokens of `generate`, by its plain loop."""
    ids = np.asarray(ids)
    return tg.generate(lm.model, ids, count, use_cache=False, **settings)[len(ids) :]


@pytest.mark.backend
def test_writing_is_generation():
    explorer = Explorer(make(num_layers=1), "small", TEXT)
    warm_up(explorer)  # asks everything once, and changes nothing
    settings = {"temperature": 1.1, "top_k": 7, "top_p": 0.95}
    for count, seed in ((4, 3), (1, 4)):
        new = written(explorer, [0, 1, 2], count, seed, **settings)
        expected = plain(explorer, [0, 1, 2], count, seed=seed, **settings)
        assert new == expected.tolist()


@pytest.mark.backend
def test_writing_without_heads_is_generation_with_what_is_left():
    lm = make()
    explorer = Explorer(lm, "small", TEXT)
    settings = {"temperature": 1.1, "top_k": 7}
    new = written(explorer, [0, 1, 2], 9, 3, without=[[0, 1]], **settings)
    kernel = lm.model.get_layer("block_0")._attention._output.kernel
    rows = to_numpy(kernel)
    rows[4:8] = 0.0
    kernel.assign(rows)
    assert new == plain(lm, [0, 1, 2], 9, seed=3, **settings).tolist()


@pytest.mark.backend
def test_an_lstm_has_no_heads():
    lm = make_lstm()
    explorer = Explorer(lm, "recurrent")
    about = explorer.describe()
    assert (about["blocks"], about["heads"], about["positions"]) == (0, 0, None)
    view = explorer.read(text="abcd")
    assert "weights" not in view
    nats = inspection.surprise(lm.model, view["ids"])
    np.testing.assert_allclose(view["surprise"][1:], nats, **CLOSE)
    answer = explorer.position(view["ids"], 3)
    assert answer["stages"] == []
    found = inspection.next_tokens(lm.model, view["ids"], count=1)[0]
    assert answer["candidates"][0]["probability"] == pytest.approx(
        found.probability, abs=1e-5
    )
    new = written(explorer, view["ids"], 1, 4, temperature=1.1)
    assert new == plain(lm, view["ids"], 1, seed=4, temperature=1.1).tolist()
    with pytest.raises(ValueError, match="at most 0 heads"):
        explorer.read(text="a", without=[[0, 0]])
    with pytest.raises(ValueError, match="at most 512 tokens, got 513"):
        explorer.read(text="a" * 513)
    with pytest.raises(ValueError, match="below 512 tokens to be continued"):
        explorer.write([0] * 512)


def test_many_heads_shorten_what_is_shown(monkeypatch):
    monkeypatch.setattr("keras_tinygpt.explorer.answers.MOST_WEIGHTS", 6 * 5**2 / 2)
    explorer = Explorer(make(), "small", "a")
    assert explorer.describe()["length"] == 5 and not explorer.crops
    with pytest.raises(ValueError, match="at most 5 tokens, got 6"):
        explorer.read(text="abcabc")
    assert len(written(explorer, [0, 1, 2], 9, 0, without=[[0, 0]])) == 2


def test_models_that_cannot_be_explored():
    lm = make()
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Explorer(tg.LanguageModel(lm.model, None), "mute")
    other = keras.Model(lm.model.inputs, lm.model.outputs)
    with pytest.raises(ValueError, match="made by build_gpt or build_lstm"):
        Explorer(tg.LanguageModel(other, lm.tokenizer), "other")
    with pytest.raises(ValueError, match="must not be empty"):
        Explorer(lm, "small", "")


def ask(server, path, question=None, method=None, headers=None, body=None):
    """Status, headers and JSON (or text) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    method = method or ("GET" if question is None and body is None else "POST")
    if question is not None:
        body = json.dumps(question)
    fields = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, body, {**fields, **(headers or {})})
    response = connection.getresponse()
    content = response.read()
    kind = response.headers["Content-Type"] or ""
    if kind == "application/json":
        content = json.loads(content)
    connection.close()
    return response.status, response.headers, content


def test_the_server_answers_with_what_the_explorer_says(server, explorer):
    assert ask(server, "/api/model")[2] == explorer.describe()
    status, _, view = ask(server, "/api/read", {"text": "abc"})
    assert (status, view) == (200, explorer.read(text="abc"))
    question = {"ids": [0, 1, 2], "position": 1, "top_k": 3}
    assert ask(server, "/api/position", question)[2] == explorer.position(**question)
    question = {"ids": [0, 1, 2], "count": 4, "seed": 5, "without": [[0, 0]]}
    lines = ask(server, "/api/write", question)[2].splitlines()
    assert [json.loads(line) for line in lines] == [*explorer.write(**question), {}]


def test_the_page_is_served_with_its_policy(server):
    status, headers, page = ask(server, "/")
    assert status == 200 and page.startswith(b"<!doctype html>")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    for path, (content, kind) in server.files.items():
        status, headers, served = ask(server, path)
        assert (status, served, headers["Content-Type"]) == (200, content, kind)
        assert b"http://" not in content and b"https://" not in content


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/server.py", "/page/index.html", "/api/read"]
)
def test_other_paths_do_not_exist(server, path):
    status, _, answer = ask(server, path)
    assert status == 404 and answer["error"].startswith("there is no ")


def test_requests_from_elsewhere_are_refused(server):
    for headers in (
        {"Host": "example.org"},
        {"Host": f"example.org:{server.server_port}"},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
    ):
        for path, question in (("/", None), ("/api/read", {"text": "abc"})):
            status, _, answer = ask(server, path, question, headers=headers)
            assert status == 403 and "must be this" in answer["error"]
    host = {"Host": f"localhost:{server.server_port}"}
    assert ask(server, "/", headers=host)[0] == 200


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"text": ""}, "the prompt must not be empty"),
        ({"text": "abé"}, "é"),
        ({"text": "a" * 2_049}, "at most 2048 tokens, got 2049"),
        ({"text": "a" * 20_001}, "at most 20000 characters, got 20001"),
        ({"text": 5}, "must be a string, got int"),
        ({"text": "a", "ids": [0]}, "one of text and ids"),
        ({}, "one of text and ids"),
        ({"ids": []}, "must not be empty"),
        ({"ids": [0] * 2_049}, "at most 2048 tokens"),
        ({"ids": [11]}, "between 0 and 10"),
        ({"ids": [10**30]}, "integer array"),
        ({"ids": [0.5]}, "integer array"),
        ({"ids": [True]}, "integer array"),
        ({"ids": [[0]]}, "integer array"),
        ({"ids": "abc"}, "ids must be a list, got str"),
        ({"ids": {"0": 1}}, "ids must be a list, got dict"),
        ({"text": "a", "without": [[2, 0]]}, "block must be between 0 and 1, got 2"),
        ({"text": "a", "without": [[0, True]]}, "head must be an integer"),
        ({"text": "a", "without": [[0]]}, "pairs [block, head], got [0]"),
        ({"text": "a", "without": [[0, 0]] * 7}, "at most 6 heads"),
        ({"text": "a", "without": 3}, "list of at most 6 heads, got 3"),
        ({"text": "a", "path": "/etc/passwd"}, "may say ids, text, without, got"),
        ({"ids": [0, 1], "position": 2}, "position must be between 0 and 1, got 2"),
        ({"ids": [0], "position": -1}, "position must be between"),
        ({"ids": [0], "position": 0.0}, "position must be an integer"),
        ({"position": 0}, "must say ids"),
        ({"ids": [0], "position": 0, "temperature": -1}, "temperature must be"),
        ({"ids": [0], "position": 0, "temperature": 1e300}, "[0, 100], got 1e+300"),
        ({"ids": [0], "position": 0, "temperature": "hot"}, "must be a number"),
        ({"ids": [0], "position": 0, "top_k": 0}, "top_k must be at least 1"),
        ({"ids": [0], "position": 0, "top_p": 1.5}, "top_p must be a finite number"),
        ({"ids": [0], "position": 0, "temperature": float("nan")}, "finite number"),
        ({"ids": [0], "count": 257}, "count must be between 1 and 256, got 257"),
        ({"ids": [0], "seed": -1}, "seed must be between 0"),
        ({"ids": [0], "count": 1, "seed": 2**60}, "seed must be between 0"),
    ],
)
def test_bad_questions_get_a_message(server, question, message):
    path = "/api/read"
    if "position" in question:
        path = "/api/position"
    elif "count" in question or "seed" in question:
        path = "/api/write"
    status, _, answer = ask(server, path, question)
    assert status == 400 and message in answer["error"]
    assert len(answer["error"].splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "is not JSON"),
        (b"\xff\xfe", 400, "is not JSON"),
        (b"[" * 30_000, 400, "is not JSON"),
        (b'{"ids": [' + b"9" * 9_999 + b"]}", 400, "is not JSON"),
        (b"[]", 400, "must be an object, got list"),
        (b"", 400, "is not JSON"),
        (b" " * (MOST_BYTES + 1), 413, f"at most {MOST_BYTES} bytes"),
    ],
)
def test_what_is_no_question(server, body, status, message):
    got, _, answer = ask(server, "/api/read", body=body)
    assert got == status and message in answer["error"]


def test_requests_of_another_kind(server):
    form = {"Content-Type": "text/plain"}
    assert ask(server, "/api/read", {"text": "a"}, headers=form)[0] == 415
    assert ask(server, "/api/elsewhere", {"text": "a"})[0] == 404
    assert ask(server, "/", method="DELETE", body="")[0] == 501
    length = {"Content-Length": "-1"}
    assert ask(server, "/api/read", headers=length, body=b"")[0] == 411


def test_a_failing_model_is_told(server, monkeypatch):
    def fail(**question):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(server.explorer, "read", fail)
    status, _, answer = ask(server, "/api/read", {"text": "abc"})
    assert status == 500 and "out of luck" in answer["error"]


def test_every_question_is_a_method_with_these_arguments(explorer):
    for path, fields in QUESTIONS.items():
        code = getattr(explorer, path.removeprefix("/api/")).__func__.__code__
        assert set(code.co_varnames[1 : code.co_argcount]) == fields


def test_many_readers_get_the_answers_they_get_alone(server, explorer):
    questions = [{"text": "abcdefghijk"[: 1 + n % 6]} for n in range(12)]
    answers = [None] * len(questions)

    def read(index):
        answers[index] = ask(server, "/api/read", questions[index])[2]

    threads = [threading.Thread(target=read, args=(n,)) for n in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [explorer.read(**question) for question in questions]


def test_the_scripts_share_one_scope_in_a_page_of_one_file():
    script = "\n".join(
        pages._plain_script(name) for name in (*pages.MODULES, pages.MAIN)
    )
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    names = re.findall(
        r"^(?:async )?(?:const|let|function\*?) (\w+)", script, re.MULTILINE
    )
    assert len(names) > 50 and len(names) == len(set(names)), sorted(names)


def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in fails(capsys, "explore", "nowhere")
    assert "port must be between 0 and 65535" in fails(
        capsys, "explore", "--port", 65_536
    )
    bad = fails(capsys, "explore", "--export", "page.txt")
    assert "export must end in .html, got 'page.txt'" in bad
    (tmp_path / "page.html").write_text("mine")
    assert "--force replaces it" in fails(capsys, "explore", "--export", "page.html")
    assert "is not a folder" in fails(capsys, "explore", "--export", "no/page.html")
    assert "got 'é'" in fails(capsys, "explore", "--prompt", "é")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 cannot be used" in fails(
            capsys, "explore", "--port", port
        )
    assert (tmp_path / "page.html").read_text() == "mine"


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    lm = make(num_layers=1)
    tg.save(tmp_path / "bundle", lm.model, lm.tokenizer)
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_tinygpt.cli", "explore", "bundle", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        # A suite started in the background passes on that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    line = process.stdout.readline()
    found = re.fullmatch(r"bundle: http://127\.0\.0\.1:(\d+) \(Ctrl-C ends\)\n", line)
    assert found, line
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", "/api/model")
    about = json.loads(connection.getresponse().read())
    assert (about["name"], about["prompt"]) == ("bundle", "geebeki")
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=120)
    assert (process.returncode, rest) == (0, "\nstopped\n")
    assert "Traceback" not in error
