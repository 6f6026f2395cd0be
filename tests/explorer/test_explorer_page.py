"""The explorer's page in a real browser: what it shows is what the Python API says."""

import json
import threading

import numpy as np
import pytest
from browser import chromium

import keras_tinygpt as tg
from keras_tinygpt import cli, inspection
from keras_tinygpt.explorer.answers import Explorer
from keras_tinygpt.explorer.server import ExplorerServer
from keras_tinygpt.generation import SamplingConfig

PROMPT = "MARGET:\nThe bell, the b"
CLOSE = {"atol": 1e-4}
ROWS = """
return [...document.querySelectorAll("#candidates tbody tr")].map((row) => ({
  ...row.dataset,
  bar: parseFloat(getComputedStyle(row.querySelector(".bar"), "::before").width),
}))
"""


@pytest.fixture(scope="module")
def lm():
    """An untrained model of two blocks of two heads."""
    tokenizer = tg.CharTokenizer.from_text(PROMPT + "abcdefghijklmnopqrstuvwxyz.,")
    config = tg.GPTConfig(tokenizer.vocab_size, 32, 2, 2, hidden_dim=16)
    model = tg.build_gpt(config, seed=1)
    for weight in model.weights:  # large enough for maps and predictions with features
        weight.assign(3.0 * weight)
    return tg.LanguageModel(model, tokenizer)


def serve(lm, prompt):
    server = ExplorerServer(Explorer(lm, "a small model", prompt))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def address(lm):
    server = serve(lm, PROMPT)
    yield server.address
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile") / "new") as browser:
        browser.show_as(1600, 1000, "light")
        yield browser


@pytest.fixture
def page(chrome, address):
    """The page as it begins; afterwards nothing was logged or asked of others."""
    chrome.log("browser")
    chrome.requests()
    chrome.open(f"{address}/")
    settle(chrome)
    yield chrome
    assert chrome.log("browser") == []
    asked = chrome.requests()
    assert asked and all(url.startswith(f"{address}/") for url in asked), asked


def settle(chrome):
    """Waits until nothing is asked any more."""
    chrome.wait("return document.body.dataset.busy === 'false'")


def candidates(chrome):
    rows = chrome.run(ROWS)
    return {
        int(row["token"]): {name: float(row[name]) for name in row if name != "token"}
        for row in rows
    }


def check_candidates(chrome, lm, text, **settings):
    """The bars are those of `next_tokens`, in numbers and in width."""
    found = inspection.next_tokens(
        lm.model, lm.tokenizer.encode(text), SamplingConfig(**settings), count=12
    )
    shown = candidates(chrome)
    assert list(shown) == [candidate.token for candidate in found]
    for token, probability, chance in found:
        np.testing.assert_allclose(shown[token]["probability"], probability, **CLOSE)
        np.testing.assert_allclose(shown[token]["chance"], chance, **CLOSE)
    return shown


def set_slider(chrome, name, value):
    chrome.run(
        "const slider = document.getElementById(arguments[0]);"
        "slider.value = arguments[1]; slider.dispatchEvent(new Event('input'))",
        *(name, value),
    )
    settle(chrome)


def continued(lm, ids, count, seed):
    """What `generate` makes of ids, by its plain loop, which compiles little."""
    return tg.generate(lm.model, ids, count, seed=seed, use_cache=False)


def weights_of(chrome, strip="#readers"):
    script = f"return [...document.querySelectorAll('{strip} li')]"
    return np.array(chrome.run(f"{script}.map((li) => Number(li.dataset.weight))"))


def test_the_page_begins_with_its_prompt(page, lm):
    assert "a small model" in page.text("h1")
    assert f"{lm.model.count_params():,} parameters" in page.text("#facts")
    assert page.run("return document.querySelector('#prompt').value") == PROMPT
    check_candidates(page, lm, PROMPT, temperature=0.8)
    shown = page.run(
        "return [...document.querySelectorAll('#tokens li')].map((li) => "
        "li.dataset.nats === undefined ? null : Number(li.dataset.nats))"
    )
    nats = inspection.surprise(lm.model, lm.tokenizer.encode(PROMPT))
    assert shown[0] is None
    np.testing.assert_allclose(shown[1:], nats, **CLOSE)


def test_characters_that_come_in_parts(chrome):
    """Each click adds one byte, whether or not it completes a character."""
    config = tg.GPTConfig(256, 32, 1, 2, hidden_dim=16)
    by_bytes = tg.LanguageModel(tg.build_gpt(config, seed=1), tg.ByteTokenizer())
    server = serve(by_bytes, "wait\r\n")
    try:
        chrome.open(f"{server.address}/")
        settle(chrome)
        ids = by_bytes.tokenizer.encode("wait\r\n")
        for draws in range(4):
            chrome.click("#step")
            settle(chrome)
            ids = continued(by_bytes, ids, 1, seed=draws)
            assert f"{len(ids)} tokens" in chrome.text("#status")
            shown = chrome.run("return document.querySelector('#prompt').value")
            text = by_bytes.tokenizer.decode(ids).replace("\r\n", "\n")
            assert shown == text.replace("\r", "\n")
        assert "\ufffd" in shown
    finally:
        server.shutdown()
        server.server_close()


def test_typing_another_prompt(page, lm):
    page.retype("#prompt", "The ball, the b")
    page.click("#read")
    page.wait("return document.querySelectorAll('#tokens li').length === 15")
    settle(page)
    check_candidates(page, lm, "The ball, the b", temperature=0.8)


def test_moving_the_sliders(page, lm):
    set_slider(page, "temperature", 1.5)
    assert page.text("#temperature-value") == "1.50"
    check_candidates(page, lm, PROMPT, temperature=1.5)
    set_slider(page, "top-k", 4)
    set_slider(page, "top-p", 0.6)
    shown = check_candidates(page, lm, PROMPT, temperature=1.5, top_k=4, top_p=0.6)
    assert 1 <= sum(row["chance"] > 0 for row in shown.values()) <= 4
    set_slider(page, "temperature", 0)
    assert "always the best" in page.text("#temperature-value")
    shown = check_candidates(page, lm, PROMPT, temperature=0, top_k=4, top_p=0.6)
    assert max(row["chance"] for row in shown.values()) == 1.0
    widths = [row["bar"] for row in shown.values()]
    shares = [row["probability"] for row in shown.values()]
    np.testing.assert_allclose(
        np.divide(widths, widths[0]), np.divide(shares, shares[0]), atol=0.02
    )


def test_choosing_a_token(page, lm):
    page.click("#tokens [data-index='4']")
    settle(page)
    check_candidates(page, lm, PROMPT[:5], temperature=0.8)
    page.type("#tokens [data-index='4']", "{right}{right}{left}")  # to 5
    settle(page)
    check_candidates(page, lm, PROMPT[:6], temperature=0.8)
    selected = "return document.querySelector('#tokens [aria-selected=true]')"
    assert page.run(f"{selected}.dataset.index") == "5"
    assert page.run(f"{selected} === document.activeElement")


def test_the_map_and_the_text(page, lm):
    maps = inspection.attention_maps(lm.model, lm.tokenizer.encode(PROMPT)).weights
    page.click("[data-head='1.0'] .pick")
    assert page.text("#head-title") == "Block 1, head 0"
    page.hover("#readers [data-index='9']")
    weights = weights_of(page)
    np.testing.assert_allclose(weights[:10], maps[1, 0, 9, :10], **CLOSE)
    np.testing.assert_allclose(weights[10:], maps[1, 0, 10:, 9], **CLOSE)
    listed = page.run(
        "return Number(document.querySelector('#reads li').dataset.weight)"
    )
    np.testing.assert_allclose(listed, maps[1, 0, 9].max(), **CLOSE)
    metrics = page.text("#head-metrics")
    ids = [*lm.tokenizer.encode(PROMPT), 0]
    measured = inspection.head_metrics(lm.model, ids, sequence_length=len(ids) - 1)
    assert f"Looks {measured.distance[1, 0]:.1f} tokens back" in metrics
    assert f"entropy {measured.entropy[1, 0]:.2f} nats" in metrics
    # The masked half is not painted, the rest is.
    alpha = page.run(
        "const canvas = document.querySelector('#map');"
        "const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width,"
        "canvas.height).data; return [...pixels].filter((_, at) => at % 4 === 3)"
    )
    size = len(PROMPT)
    painted = np.array(alpha).reshape(size, size) > 0
    np.testing.assert_array_equal(painted, np.tril(np.ones((size, size), bool)))


def test_the_map_by_keyboard(page):
    page.run("document.querySelector('#map-box').focus()")
    page.type("#map-box", "{up}{left}")
    assert f"({len(PROMPT) - 2}) reads" in page.text("#readout")
    page.type("#map-box", "{right}" * len(PROMPT))
    assert "it comes later" in page.text("#readout")


def test_the_overview_and_its_captions(page, lm):
    assert len(page.run("return [...document.querySelectorAll('#grid .head')]")) == 4
    ids = [*lm.tokenizer.encode(PROMPT), 0]
    measured = inspection.head_metrics(lm.model, ids, sequence_length=len(ids) - 1)
    caption = page.text("[data-head='0.1'] .caption").split()
    assert caption[0] == f"{measured.distance[0, 1]:.1f}"
    assert caption[2] == f"{measured.entropy[0, 1]:.1f}"


def test_switching_a_head_off(page, lm):
    before = candidates(page)
    page.click("[data-head='0.1'] .off")
    page.wait("return document.querySelector('.head.switched-off') !== null")
    settle(page)
    ids = lm.tokenizer.encode(PROMPT)
    trace = inspection.Tracer(lm.model).trace(ids, without=[(0, 1)])
    masses = np.exp(trace.logits[-1].astype("float64"))
    after = candidates(page)
    for token, row in after.items():
        np.testing.assert_allclose(
            row["probability"], masses[token] / masses.sum(), **CLOSE
        )
        if token in before:
            assert row["whole"] == before[token]["probability"]
    assert max(abs(row["whole"] - row["probability"]) for row in after.values()) > 1e-3
    assert page.text("[data-head='0.1'] .off") == "turn on"
    page.click("#restore")
    page.wait("return document.querySelector('.head.switched-off') === null")
    settle(page)
    assert candidates(page) == before


def test_the_path_ends_in_the_prediction(page, lm):
    names = page.run(
        "return [...document.querySelectorAll('#stages tbody th')].map((th) => "
        "th.innerText)"
    )
    assert names[0] == "embedding" and names[-1] == "the head: the prediction"
    assert names[1:-1] == [
        f"block {block} {part}"
        for block in range(2)
        for part in ("attention", "feed-forward")
    ]
    guesses = page.run(
        "return [...document.querySelectorAll('#stages tbody tr')].map((row) => "
        "Number(row.querySelector('.guess').dataset.probability))"
    )
    found = inspection.next_tokens(lm.model, lm.tokenizer.encode(PROMPT), count=1)[0]
    np.testing.assert_allclose(guesses[-2:], found.probability, **CLOSE)


def test_one_token_at_a_time(page, lm):
    """Each step draws with the next seed."""
    page.retype("#seed", "7")
    ids = lm.tokenizer.encode(PROMPT)
    for step in range(3):
        page.click("#step")
        ids = continued(lm, ids, 1, 7 + step)
        page.wait(
            f"return document.querySelectorAll('#tokens li').length === {len(ids)}"
        )
        settle(page)
    text = lm.tokenizer.decode(ids)
    assert page.run("return document.querySelector('#prompt').value") == text
    check_candidates(page, lm, text, temperature=0.8)


def test_a_prompt_that_was_not_read_yet_is_read_before_writing(page, lm):
    page.retype("#prompt", "The c")
    page.retype("#seed", "2")
    page.click("#step")
    page.wait("return document.querySelectorAll('#tokens li').length === 6")
    settle(page)
    ids = continued(lm, lm.tokenizer.encode("The c"), 1, 2)
    check_candidates(page, lm, lm.tokenizer.decode(ids), temperature=0.8)


def test_writing_on(page, lm):
    page.retype("#count", "9")
    page.retype("#seed", "3")
    page.click("#write")
    page.wait("return document.querySelectorAll('#tokens li').length === 32")
    settle(page)
    text = lm.tokenizer.decode(continued(lm, lm.tokenizer.encode(PROMPT), 9, 3))
    assert page.run("return document.querySelector('#prompt').value") == text
    check_candidates(page, lm, text, temperature=0.8)
    assert page.text("#write") == "Write on"


def test_a_text_longer_than_the_window(page, lm):
    text = PROMPT + "ell tolled and tolled."
    page.retype("#prompt", text)
    page.click("#read")
    page.wait("return document.querySelector('#status').innerText.includes('last 32')")
    settle(page)
    assert page.run("return document.querySelectorAll('#tokens li').length") == 32
    check_candidates(page, lm, text, temperature=0.8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the prompt must not be empty"),
        ("h\u00e9", "got '\u00e9'"),
        ("b" * 2_049, "at most 2048 tokens, got 2049"),
    ],
)
def test_bad_prompts_get_a_message(chrome, address, text, message):
    chrome.open(f"{address}/")
    settle(chrome)
    chrome.run("document.querySelector('#prompt').value = arguments[0]", text)
    chrome.click("#read")
    chrome.wait("return !document.querySelector('#message').hidden")
    assert message in chrome.text("#message")
    assert chrome.run("return document.querySelector('#message').role") == "alert"
    chrome.run("document.querySelector('#prompt').value = 'The b'")
    chrome.click("#read")
    chrome.wait("return document.querySelector('#message').hidden")
    # What the browser itself says of the refused request, and nothing else.
    assert {entry["source"] for entry in chrome.log("browser")} == {"network"}


@pytest.mark.parametrize(("field", "value"), [("seed", "-1"), ("count", "999")])
def test_bad_numbers_get_a_message(chrome, address, field, value):
    chrome.open(f"{address}/")
    settle(chrome)
    chrome.run(f"document.querySelector('#{field}').value = '{value}'")
    chrome.click("#write")
    chrome.wait("return !document.querySelector('#message').hidden")
    assert f"{field} must be between" in chrome.text("#message")
    chrome.log("browser")


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_and_theme(page, width, scheme):
    page.show_as(width, 1000, scheme)
    assert page.run("return document.documentElement.scrollWidth") == width
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, ground[4:-1].split(","))) > 3 * 128
    assert light == (scheme == "light")
    page.show_as(1600, 1000, "light")


def test_everything_is_named_and_reached_by_keyboard(page):
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, textarea, [role]')]"
        ".filter((one) => !(one.innerText || one.labels?.length || "
        "one.getAttribute('aria-label') || one.matches('[role=alert], [role=status]')))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []
    stops = page.run(
        "return [...document.querySelectorAll('#tokens li, #readers li')]"
        ".filter((li) => li.tabIndex === 0).length"
    )
    assert stops == 2  # one in each strip; arrows do the rest


def test_an_lstm_is_told_to_have_no_heads(chrome):
    tokenizer = tg.CharTokenizer.from_text(PROMPT)
    model = tg.build_lstm(tg.LSTMConfig(tokenizer.vocab_size, 13, embedding_dim=5))
    lm = tg.LanguageModel(model, tokenizer)
    server = serve(lm, PROMPT)
    chrome.log("browser")
    chrome.open(f"{server.address}/")
    settle(chrome)
    assert "It has no attention heads" in chrome.text("#no-heads")
    for part in ("heads", "path-card"):
        shown = f"return document.getElementById('{part}').checkVisibility()"
        assert not chrome.run(shown)
    check_candidates(chrome, lm, PROMPT, temperature=0.8)
    assert chrome.log("browser") == []
    server.shutdown()
    server.server_close()


def test_a_page_in_one_file(chrome, lm, tmp_path, monkeypatch):
    """`--export` writes a page that needs no server, one head switched off included."""
    monkeypatch.chdir(tmp_path)
    tg.save("bundle", lm.model, lm.tokenizer)
    argv = ["explore", "bundle", "--prompt", PROMPT, "--export", "page.html"]
    cli.main([*argv, "--temperature", "1.5"])
    chrome.log("browser")
    chrome.requests()
    page = tmp_path / "page.html"
    chrome.open(page.as_uri())
    settle(chrome)
    before = check_candidates(chrome, lm, PROMPT, temperature=1.5)
    chrome.click("#tokens [data-index='4']")
    settle(chrome)
    check_candidates(chrome, lm, PROMPT[:5], temperature=1.5)
    chrome.type("#tokens [data-index='4']", "\ue010")  # the End key
    settle(chrome)
    chrome.click("[data-head='0.1'] .off")
    settle(chrome)
    trace = inspection.Tracer(lm.model).trace(
        lm.tokenizer.encode(PROMPT), without=[(0, 1)]
    )
    masses = np.exp(trace.logits[-1].astype("float64"))
    for token, row in candidates(chrome).items():
        expected = masses[token] / masses.sum()
        np.testing.assert_allclose(row["probability"], expected, **CLOSE)
        assert row["whole"] == before.get(token, row)["whole"]
    assert chrome.run("return document.querySelector('#prompt').disabled")
    assert "written by tinygpt explore --export" in chrome.text("#record-note")
    assert chrome.log("browser") == []
    assert chrome.requests() == [page.as_uri()]
    recorded = json.loads(
        page.read_text("utf-8").split('id="recorded">')[1].split("</script>")[0]
    )
    assert recorded["model"]["temperature"] == 1.5
