"""The lab: its notebook, its solutions, and what its checkpoints say of mistakes."""

import math
import os
import re
import sys
import tomllib

import jupytext
import keras
import nbclient
import nbformat
import numpy as np
import pytest
from helpers import ROOT, tiny_shakespeare
from keras import ops

import keras_tinygpt as tg

LAB = ROOT / "examples" / "lab"
sys.path.insert(0, str(LAB))
import checkpoints  # noqa: E402

STUB = "raise NotImplementedError"
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)


def notebook():
    return nbformat.read(LAB / "lab.ipynb", as_version=4)


def exercises(cells):
    """By name: index of the stub, the solution below it, the line of its checkpoint."""
    found = {}
    for index, cell in enumerate(cells):
        if cell.cell_type == "code" and STUB in cell.source:
            name = re.match(r"(?:def|class) (\w+)", cell.source).group(1)
            solution = SOLUTION.search(cells[index + 1].source).group(1)
            found[name] = index, solution, cells[index + 2].source.splitlines()[0]
    return found


EXERCISES = exercises(notebook().cells)


def answer(capsys, name, source):
    """Runs the notebook's checkpoint on an answer; returns its line and its value."""
    space = {"np": np, "ops": ops, "keras": keras, "math": math, "tg": tg}
    space |= {"checkpoints": checkpoints, "attend": checkpoints.ready_attention}
    space["make_mask"] = checkpoints.ready_causal_mask
    exec(source, space)
    statement = EXERCISES[name][2]
    exec(statement, space)
    (line,) = capsys.readouterr().out.splitlines()
    return line, space[name], space[statement.split(" = ")[0]]


def test_script_and_notebook_are_the_same():
    """After a change of lab.py: jupytext --update --to ipynb examples/lab/lab.py."""
    script, shipped = jupytext.read(LAB / "lab.py"), notebook()
    for ours, theirs in zip(script.cells, shipped.cells, strict=True):
        assert ours.cell_type == theirs.cell_type
        assert ours.source == theirs.source
        assert ours.metadata == theirs.metadata
        if theirs.cell_type == "code":
            assert theirs.outputs == [] and theirs.execution_count is None
    assert shipped.metadata.kernelspec.name == script.metadata.kernelspec.name
    nbformat.validate(shipped)


def test_the_first_code_cell_installs_the_package():
    first = next(cell for cell in notebook().cells if cell.cell_type == "code")
    assert '"-m", "pip", "install", "-q", SOURCE]' in first.source
    assert "keras" not in re.findall(r"^import (\w+)", first.source, re.MULTILINE)


def test_the_checkpoints_come_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in LAB.glob("*.py"):
        if path.name != "lab.py":
            shipped = f"keras_tinygpt/_data/lab/{path.name}"
            assert wheel[str(path.relative_to(ROOT))] == shipped


def test_every_exercise_is_there():
    assert list(EXERCISES) == [
        "count_parameters",
        "attention",
        "causal_mask",
        "largest_leak",
        "embed",
        "score",
        "mean_distance",
        "MyMultiHeadAttention",
        "MyBlock",
    ]
    cells = notebook().cells
    starts = [0, *[index for index, _, _ in EXERCISES.values()]]
    for start, stop in zip(starts, starts[1:], strict=False):
        text = "\n".join(cell.source for cell in cells[start : stop + 1])
        assert "**Predict first.**" in text and "<summary>Hint</summary>" in text


@pytest.mark.backend
@pytest.mark.parametrize("name", EXERCISES)
def test_solutions_pass_and_are_used(capsys, name):
    line, given, used = answer(capsys, name, EXERCISES[name][1])
    assert re.fullmatch(r"(Exercise|Stretch) \w+, [\w ]+: passed\.", line)
    assert used is given


@pytest.mark.backend
@pytest.mark.parametrize("name", EXERCISES)
def test_without_an_answer_the_package_stands_in(capsys, name):
    index, solution, _ = EXERCISES[name]
    line, given, used = answer(capsys, name, notebook().cells[index].source)
    assert line.endswith("not done yet. Later parts use the package's own.")
    assert used is not given
    broken = re.sub(r"^( +)return .*", r"\1return undefined", solution, flags=re.M)
    line, given, used = answer(capsys, name, broken)
    assert "It raises NameError: " in line and "name 'undefined' is not" in line
    assert used is not given


@pytest.mark.backend
@pytest.mark.parametrize("name", list(EXERCISES)[:-2])
def test_what_stands_in_passes(capsys, name):
    ready = getattr(checkpoints, f"ready_{name}")
    check = EXERCISES[name][2].split("checkpoints.")[1].split("(")[0]
    assert getattr(checkpoints, check)(ready) is ready
    assert capsys.readouterr().out.endswith(": passed.\n")


# What a solution is changed to, and what its checkpoint must say.
WRONG = {
    "count_parameters": [
        ("+ num_layers * block", "+ block", "all blocks but one"),
        ("block + norm + head", "block + head", "exactly the final norm"),
        (
            "vocab_size + max_sequence_length",
            "vocab_size",
            "exactly the position table",
        ),
        ("vocab_size + vocab_size\n", "vocab_size\n", "the bias of the output layer"),
        ("block + norm + head", "block + norm", "exactly the output layer"),
        ("+ hidden_dim**2 + hidden_dim\n", "\n", "the projection after attention"),
        (
            "2 + hidden_dim**2 +",
            "2 + 3 * hidden_dim + hidden_dim**2 +",
            "there are none",
        ),
        (" + intermediate_dim + hidden_dim\n", "\n", "biases of the feed-forward"),
        ("attention + norm +", "attention +", "exactly one norm in every block"),
        ("tables + num_layers", "7 + num_layers", "too few at V=65, T=128"),
    ],
    "attention": [
        ("math.sqrt(query.shape[-1])", "query.shape[-1]", "are divided by H: its"),
        ("    scores = scores / math.sqrt(query.shape[-1])\n", "", "not divided"),
        ("math.sqrt(query.shape[-1])", "2.0", "one head, H = 9: off by"),
        ("scores / math", "scores * math", "multiplied by the square root"),
        ("axis=-1", "axis=-2", "softmax runs over the queries"),
        ("where(mask, scores", "where(~mask, scores", "wrong way round"),
        ("where(mask,", "where(mask.T,", "mask is transposed"),
        ("-math.inf", "0.0", "exp(0) is 1"),
        ("-math.inf", "-10.0", "must be exactly 0"),
        ("if mask is not None", "if False", "mask is not used"),
        (
            "scores, -math.inf)\n    weights = ops.softmax(scores, axis=-1)\n",
            "scores, scores)\n    weights = ops.softmax(scores, axis=-1)\n"
            "    if mask is not None:\n"
            "        weights = ops.where(mask, weights, 0.0)\n",
            "softmax comes before the mask",
        ),
        (
            "(query, ops.swapaxes(key, -1, -2))",
            "(key, ops.swapaxes(query, -1, -2))",
            "scores are transposed",
        ),
        ("matmul(weights, value), weights", "matmul(weights, key), weights", "average"),
        ("matmul(weights, value), weights", "matmul(weights, value)", "two values"),
        ("return ops.matmul(weights, value)", "return value", "average them"),
    ],
    "causal_mask": [
        ("np.tril", "np.triu", "mask is transposed"),
        ("np.tril", "~np.tril", "wrong way round"),
        ('"bool")', '"bool"), -1', "diagonal must be True"),
        ('"bool")', '"bool"), 1', "one column too wide"),
        (
            'np.tril(np.ones((length, length), dtype="bool"))',
            "np.ones((length, length))",
            "must hold True and False",
        ),
        ("(length, length)", "(length, length + 1)", "must have shape (5, 5)"),
    ],
    "largest_leak": [
        ("inputs.copy()", "inputs", "change a copy"),
        ("np.abs", "", "take absolute values"),
        ("[:changed]", "", "counts all rows"),
        ("[:changed]", "[: changed + 1]", "counts the changed row itself"),
        ("[:changed]", "[changed + 1 :]", "counts later rows"),
        ("[:changed]", "[changed - 1 : changed]", "from far ahead"),
        ("function(other)", "function(inputs)", "finds nothing"),
    ],
    "embed": [
        ("tokens + positions", "tokens", "positions are left out"),
        ("np.arange(ids.shape[1])", "ids", "read by token"),
        ("np.arange(ids.shape[1])", "np.arange(ids.shape[1]) + 1", "start at 1"),
        ("np.arange(ids.shape[1])", "np.zeros(5, int)", "the vector of the first"),
        (
            "np.arange(ids.shape[1])",
            "np.arange(ids.shape[1])[::-1].copy()",
            "backwards",
        ),
        ("tokens + positions", "tokens * positions", "multiplied: add them"),
        ("tokens + positions", "0 * tokens + positions", "tokens are left out"),
        ("tokens + positions", "tokens + 2 * positions", ": off by up to"),
        ("return", "x =", "is None: return it"),
    ],
    "score": [
        ("ops.mean(losses)", "ops.sum(losses)", "The loss is summed"),
        ("ops.mean(losses)", "ops.mean(ops.sum(losses, axis=-1))", "summed over pos"),
        ("ops.mean(losses)", "ops.mean(losses) / math.log(2)", "in bits"),
        ("ops.mean(losses)", "-ops.mean(losses)", "sign is wrong"),
        ("ops.logsumexp(logits, axis=-1) -", "-", "log-softmax is missing"),
        ("ops.mean(losses)", "-ops.log(ops.mean(ops.exp(-losses)))", "before the log"),
        ("(B, T)\n", "\n    losses = losses[:, :0]\n", "NaN"),
        ("math.exp(nats)", "2**nats", "not 2 ** nats"),
        ("math.exp(nats)", "math.exp(-nats)", "not exp(-nats)"),
        ("math.exp(nats)", "float(ops.mean(ops.exp(losses)))", "not the mean of exp"),
        (
            "ops.logsumexp(logits, axis=-1)",
            "ops.log(ops.sum(ops.exp(logits), axis=-1))",
            "overflow",
        ),
    ],
    "mean_distance": [
        ("[..., 1:]", "", "first query is counted"),
        (
            "places[:, None] - places",
            "places - places[:, None]",
            "distance is negative",
        ),
        (".mean(axis=-1)", ".sum(axis=-1)", "rows are summed"),
        ("weights * back", "weights * places", "mean place of the keys"),
        (
            "rows = np.sum(weights * back, axis=-1)",
            "return np.mean(weights * back, (-1, -2))",
            "runs over all cells",
        ),
        ("np.sum(weights * back, axis=-1)", "places - weights.argmax(-1)", "strongest"),
    ],
    "MyMultiHeadAttention": [
        (
            "outputs = ops.transpose(outputs, (0, 2, 1, 3))",
            "outputs = ops.transpose(ops.flip(outputs, axis=1), (0, 2, 1, 3))",
            "wrong order: the last one",
        ),
        (
            "outputs = ops.transpose(outputs, (0, 2, 1, 3))",
            "outputs = ops.transpose(outputs, (0, 2, 3, 1))",
            "wrong order, coordinate",
        ),
        ("outputs = ops.transpose(outputs, (0, 2, 1, 3))", "", "transpose to (B, T"),
        (
            "(batch, length, self.num_heads, width // self.num_heads))\n"
            "        return ops.transpose(x, (0, 2, 1, 3))",
            "(batch, self.num_heads, length, width // self.num_heads))\n"
            "        return x",
            "then transpose",
        ),
        (
            "self.num_heads, width // self.num_heads))\n"
            "        return ops.transpose(x, (0, 2, 1, 3))",
            "width // self.num_heads, self.num_heads))\n"
            "        return ops.transpose(x, (0, 3, 1, 2))",
            "cut as (H, N)",
        ),
        ("attend(query,", "attend(query / self.num_heads**0.5,", "square root of D"),
        (", make_mask(inputs.shape[1]))", ")", "causal mask is missing"),
        (
            "self.projection(ops.reshape(outputs, inputs.shape))",
            "ops.reshape(outputs, inputs.shape)",
            "projection after the heads",
        ),
        ("make_mask(inputs.shape[1])", "make_mask(inputs.shape[1]).T", "is transposed"),
    ],
    "MyBlock": [
        ("x = inputs + self", "x = self", "first residual is missing"),
        ("return x + self", "return self", "second residual is missing"),
        (
            "self.attention(self.attention_norm(inputs))",
            "self.attention(inputs)",
            "first norm is",
        ),
        ("self.feed_forward_norm(x)", "x", "second norm is missing"),
        ("self.feed_forward_norm(x)", "self.attention_norm(x)", "first norm is used"),
        (
            "self.feed_forward_norm(x)",
            "self.feed_forward_norm(inputs)",
            "reads the block",
        ),
        ("return x + self", "return inputs + self", "attention is lost"),
        (
            "inputs + self.attention(self.attention_norm(inputs))",
            "self.attention_norm(inputs) + self.attention(self.attention_norm(inputs))",
            "normalised input is added",
        ),
        ("ops.gelu", "ops.relu", "is ReLU"),
        ("ops.gelu", "", "nonlinearity between"),
        ("return x + self.narrow(hidden)", "return x", "feed-forward layer is missing"),
        (
            "x = inputs + self.attention(self.attention_norm(inputs))\n"
            "        hidden = ops.gelu(self.widen(self.feed_forward_norm(x)))\n"
            "        return x + self.narrow(hidden)",
            "x = self.attention_norm(inputs + self.attention(inputs))\n"
            "        return self.feed_forward_norm("
            "x + self.narrow(ops.gelu(self.widen(x))))",
            "post-norm",
        ),
    ],
}


@pytest.mark.backend
@pytest.mark.parametrize("name", WRONG)
def test_checkpoints_say_what_is_wrong(capsys, name):
    """Each stub filled with typical wrong answers, made from the solution shown."""
    solution, lines = EXERCISES[name][1], set()
    for right, wrong, said in WRONG[name]:
        assert right in solution
        line, given, used = answer(capsys, name, solution.replace(right, wrong))
        assert ": not yet. " in line and said in line
        assert used is not given
        lines.add(line)
    assert len(lines) == len(WRONG[name])  # no two mistakes are told alike


def execute(monkeypatch, answered=True, **parameters):
    """Runs the notebook in a kernel of its own; returns its cells.

    Args:
        monkeypatch: pytest's.
        answered: whether each stub is replaced by the solution below it.
        parameters: values of the cell tagged so.
    """
    book = notebook()
    if answered:
        for index, solution, _ in EXERCISES.values():
            book.cells[index].source = solution
    (cell,) = (c for c in book.cells if "parameters" in c.metadata.get("tags", []))
    for name, value in parameters.items():
        cell.source, count = re.subn(
            rf"^{name} = .*", f"{name} = {value!r}", cell.source, flags=re.MULTILINE
        )
        assert count == 1
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    client = nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": LAB}}
    )
    client.execute()
    return book.cells


def check_outputs(cells, verdict, trained=True):
    """Every checkpoint gave its verdict, every figure is there, nothing was warned of.

    Args:
        cells: of an executed notebook.
        verdict: what the checkpoints of the exercises must say; others must pass.
        trained: whether there were steps enough for the one after training.
    """
    names = {solution[2] for solution in EXERCISES.values()}
    for cell in cells:
        if cell.cell_type != "code":
            continue
        texts = [x.text for x in cell.outputs if x.output_type == "stream"]
        printed = "".join(texts)
        assert "Warning" not in printed, printed
        images = [x for x in cell.outputs if "image/png" in x.get("data", {})]
        assert len(images) == len(re.findall(r"^show\(", cell.source, re.MULTILINE))
        if "checkpoints." not in cell.source or "import checkpoints" in cell.source:
            continue
        said = verdict if cell.source.splitlines()[0] in names else ": passed."
        if not trained and "checkpoints.trained" in cell.source:
            said = "not below"
        assert said in printed


@pytest.mark.parametrize(
    "changes", [{"STEPS": 100}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_the_notebook_runs_in_quick_mode(monkeypatch, changes):
    """With the solutions in place, on the embedded text."""
    cells = execute(monkeypatch, **changes)
    check_outputs(cells, ": passed.")
    assert sum(len(re.findall(r"^show\(", c.source, re.MULTILINE)) for c in cells) == 8


@pytest.mark.slow
def test_the_notebook_runs_without_any_answer(monkeypatch):
    check_outputs(execute(monkeypatch, answered=False, STEPS=100), "not done yet")


@pytest.mark.slow
def test_the_notebook_runs_in_full_mode(monkeypatch):
    """The models of the full mode on tiny Shakespeare, with a few steps."""
    corpus = str(tiny_shakespeare())
    cells = execute(monkeypatch, MODE="full", CORPUS=corpus, STEPS=5)
    check_outputs(cells, ": passed.", trained=False)
