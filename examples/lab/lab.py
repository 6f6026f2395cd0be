# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The transformer, by hand and by measurement
#
# You write the few lines that make a transformer a transformer, train a small GPT and
# an LSTM on the same text, and look at what the heads read. Everything else comes from
# `keras_tinygpt`, and each of your answers is compared with it.
#
# An exercise has a question to answer **before** you run anything, a stub, a folded
# hint, a folded solution and a checkpoint. A checkpoint prints one line: passed, not
# done yet, or what is wrong. It never stops the notebook: later parts use your function
# once it has passed and the package's until then, so you may skip any exercise and come
# back.
#
# | part | you write | minutes, about |
# |---|---|---|
# | 0 Read the model | a count of its parameters | 5 |
# | 1 Attention | scaled dot-product attention | 15 |
# | 2 The causal mask | the mask and the leak test | 15 |
# | 3 Positions | the input of the model | 10 |
# | 4 Training | the loss; then GPT, LSTM and n-grams at stated budgets | 20 |
# | 5 Heads | how far back each head reads | 10 |
# | Stretch | the multi-head layer and the block | 30 |
# | More experiments | nothing: sabotaged masks, longer windows, causes | 15 |
#
# Shapes: B texts, T positions, D width of the model, N heads, H = D / N width of a
# head, F width inside the feed-forward layer, L blocks, V tokens.

# %% [markdown]
# ## Set up
#
# The first cell installs the package where it is missing. `SOURCE` is anything that pip
# takes: as it stands, the copy of the repository that this notebook lies in; in Colab
# put the address of the repository (`git+https://...`) or the name of an uploaded wheel
# there.

# %%
import importlib.util
import os
import subprocess
import sys

SOURCE = "../.."
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # fewer start-up messages
if importlib.util.find_spec("keras_tinygpt") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", SOURCE], check=True)

# %%
import dataclasses
import math
import tempfile
from pathlib import Path

import keras
import matplotlib
import numpy as np
from IPython.display import Image, display
from keras import ops
from matplotlib.figure import Figure

import keras_tinygpt as tg
from keras_tinygpt import plots
from keras_tinygpt.checks import check_choice
from keras_tinygpt.evaluation import losses_by_position
from keras_tinygpt.inspection import figures
from keras_tinygpt.inspection.maps import audit
from keras_tinygpt.studies import context, mini, recipes, runs
from keras_tinygpt.text.corpus import SHAKESPEARE_SHA256
from keras_tinygpt.text.windows import split_parts

if not Path("checkpoints.py").exists():  # the notebook was opened by itself
    sys.path.append(str(Path(tg.__file__).parent / "_data" / "lab"))
import checkpoints

# %% [markdown]
# `MODE` chooses the size of all trainings. `"quick"` reads the text that comes with the
# package; the whole notebook then needs less than two minutes of one CPU core. `"full"`
# trains the `mini` models on tiny Shakespeare, which is downloaded once. Two CPU cores
# needed 50 minutes for the two of them (see Results in the README of the repository),
# so take a GPU. `CORPUS` (a path) and `STEPS` replace those of the mode; a few steps
# are enough to see whether everything runs.

# %% tags=["parameters"]
MODE = "quick"
CORPUS = None
STEPS = None

# %%
FULL = check_choice("MODE", MODE, ("quick", "full")) == "full"
corpus = tg.load_corpus(CORPUS or ("shakespeare" if FULL else "five-nights"))
tokenizer = tg.CharTokenizer.from_text(corpus)
V = tokenizer.vocab_size
split = mini.SPLIT if corpus.sha256 == SHAKESPEARE_SHA256 else (0.8, 0.1, 0.1)
parts = split_parts(tg.encode_corpus(corpus, tokenizer), split)
if FULL:
    gpt_recipe, lstm_recipe = (
        recipes.recipe(kind, "mini", V) for kind in ("gpt", "lstm")
    )
    gpt_config, gpt_training = gpt_recipe.model, gpt_recipe.training
    lstm_config, lstm_training = lstm_recipe.model, lstm_recipe.training
else:
    gpt_config = tg.GPTConfig(V, 32, num_layers=2, num_heads=4, hidden_dim=64)
    lstm_config = tg.LSTMConfig(V, 128, embedding_dim=32, max_sequence_length=32)
    gpt_training = tg.TrainConfig(
        steps=800,
        batch_size=16,
        learning_rate=1e-2,
        validate_every=100,
        validation_windows=64,
        jit_compile=False,  # compiling would take longer than it saves
    )
    lstm_training = gpt_training
if STEPS is not None:
    gpt_training, lstm_training = (
        dataclasses.replace(x, steps=min(STEPS, x.steps))
        for x in (gpt_training, lstm_training)
    )
sizes = ", ".join(f"{name} {len(ids):,}" for name, ids in parts.items())
print(f"{corpus.name}: {V} different characters; {sizes}")


# %%
def show(plot, *args, **options):
    """Draws one of the package's figures and shows it here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        plot(*args, path=path, **options)
        display(Image(path.read_bytes()))


def numpy(tensor):
    return np.asarray(ops.convert_to_numpy(tensor))


# %% [markdown]
# ## 0 Read the model
#
# The `mini` GPT, weight by weight. Tokens and positions each have a table; a block is
# attention (queries, keys and values in one matrix) and a feed-forward layer, each with
# a norm before it; a last norm and a linear layer make the logits.

# %%
mini_config = tg.GPTConfig.preset("mini", vocab_size=65)
mini_gpt = tg.build_gpt(mini_config)
for weight in mini_gpt.weights:
    if "block_" not in weight.path or "block_0" in weight.path:
        print(f"{weight.path:<46} {tuple(weight.shape)}")
print(f"... and blocks 1 to {mini_config.num_layers - 1} like block_0")

# %% [markdown]
# **Predict first.** Which holds the most weights: the two tables, the four attention
# layers, the four feed-forward layers or the output layer? And with 16 heads instead of
# 4, does the count rise, fall or stay?
#
# **Exercise 0.** Write the count as a formula. Note what is not among its arguments.
#
# <details><summary>Hint</summary>
#
# A matrix from A to B numbers has A B weights and, here, a bias of B: everywhere but in
# the queries, keys and values. A norm has 2 D. Each block has two norms.
#
# </details>


# %%
def count_parameters(
    vocab_size, max_sequence_length, hidden_dim, num_layers, intermediate_dim
):
    """The number of weights of the GPT above."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def count_parameters(
#     vocab_size, max_sequence_length, hidden_dim, num_layers, intermediate_dim
# ):
#     """The number of weights of the GPT above."""
#     tables = (vocab_size + max_sequence_length) * hidden_dim
#     norm = 2 * hidden_dim
#     attention = 3 * hidden_dim**2 + hidden_dim**2 + hidden_dim
#     feed_forward = 2 * hidden_dim * intermediate_dim + intermediate_dim + hidden_dim
#     block = norm + attention + norm + feed_forward
#     head = hidden_dim * vocab_size + vocab_size
#     return tables + num_layers * block + norm + head
# ```
#
# </details>

# %%
count = checkpoints.count_parameters(count_parameters)
print(f"mini: {count(65, 128, 128, 4, 512):,} of {mini_gpt.count_params():,} weights")

# %% [markdown]
# <details><summary>After the prediction</summary>
#
# The feed-forward layers hold two thirds of every block (8 D² of 12 D² where F = 4 D).
# The number of heads is not an argument: N heads of width D / N need the same matrices
# as one head of width D. More heads are more, narrower lookups, not more weights.
#
# </details>

# %% [markdown]
# ## 1 Attention
#
# Position t asks with a query, position i offers a key and hands over a value:
#
# $$A = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt H}\right), \qquad
# \text{outputs} = A\,V$$
#
# Row t of A says how much of each value position t takes; each row sums to 1.
#
# **Predict first.** Queries and keys are drawn at random, every coordinate with mean 0
# and standard deviation 1. What is the standard deviation of the scores q·k, undivided,
# for heads of these widths? Put your numbers in place of `None`. And how large is the
# largest of ten weights?

# %%
predicted = {4: None, 16: None, 64: None, 256: None}  # your numbers

# %% [markdown]
# **Exercise 1.** Write it with `keras.ops`. Everything before the last two dimensions
# is batch: `(B, N, T, H)` must work as well as `(T, H)`. Where `mask` is False, a query
# may not read a key: its weight must be exactly 0 and the others of the row still sum
# to 1.
#
# <details><summary>Hint</summary>
#
# `ops.matmul` treats leading dimensions as batch; `ops.swapaxes(key, -1, -2)`
# transposes the last two. A score of minus infinity has weight exp(-inf) = 0:
# `ops.where(mask, scores, -math.inf)`. In which order do mask and softmax have to come?
#
# </details>


# %%
def attention(query, key, value, mask=None):
    """Outputs (..., T, H) and weights (..., T, T)."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def attention(query, key, value, mask=None):
#     """Outputs (..., T, H) and weights (..., T, T)."""
#     scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
#     scores = scores / math.sqrt(query.shape[-1])
#     if mask is not None:
#         scores = ops.where(mask, scores, -math.inf)
#     weights = ops.softmax(scores, axis=-1)
#     return ops.matmul(weights, value), weights
# ```
#
# </details>

# %%
attend = checkpoints.attention(attention)

# %%
random = np.random.default_rng(0)
spreads = {"not divided": [], "divided by the root of H": [], "divided by H": []}
print("   H  predicted  measured  largest weight  ... with division by the root of H")
for width, guess in predicted.items():
    query, key = random.standard_normal((2, 500, 10, width)).astype("float32")
    scores = query @ key.swapaxes(-1, -2)
    for line, divisor in zip(spreads, (1.0, math.sqrt(width), width), strict=True):
        spreads[line].append(scores.std() / divisor)
    undone = query * math.sqrt(width)  # so that attention's own division is undone
    plain, divided = (numpy(attend(x, key, key)[1]) for x in (undone, query))
    print(
        f"{width:>4}  {'?' if guess is None else guess:>9}  {scores.std():>8.2f}  "
        f"{plain.max(-1).mean():>14.2f}  {divided.max(-1).mean():>11.2f}"
    )
show(
    plots.plot_lines,
    spreads,
    list(predicted),
    labels=("width of a head H", "standard deviation of the scores"),
    title="How far scores spread before any training",
)

# %% [markdown]
# <details><summary>After the prediction</summary>
#
# q·k is a sum of H independent products, each with variance 1, so its variance is H.
# Only the square root keeps the spread where it is at any width. Undivided, one weight
# takes nearly everything and the softmax hardly passes a gradient; divided by H, all
# weights are nearly equal and attention begins as an average.
#
# </details>

# %% [markdown]
# ## 2 The causal mask
#
# One pass over a text gives a prediction at every position. Position t may therefore
# read positions up to t only; otherwise it would see the answer.
#
# **Predict first.** A model whose positions also read the next one is trained. What
# happens to its training loss, and what is the model worth when it writes a text?
#
# **Exercise 2a.** Write the mask: row t is True where position t may read.
#
# <details><summary>Hint</summary>
#
# `np.tril` keeps what is on and below the diagonal. Which index is the row?
#
# </details>


# %%
def causal_mask(length):
    """Bool array (T, T): True where row t may read column i."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def causal_mask(length):
#     """Bool array (T, T): True where row t may read column i."""
#     return np.tril(np.ones((length, length), dtype="bool"))
# ```
#
# </details>

# %%
make_mask = checkpoints.causal_mask(causal_mask)

# %% [markdown]
# A mask is easily wrong in a way that nobody sees: the loss only gets better. The leak
# test does not look at the mask. It changes one position and looks whether anything
# **before** it moves.
#
# **Predict first.** Someone applies the softmax to all scores, sets the weights of
# later positions to 0 and leaves it at that. No weight above the diagonal is left. Does
# the output of position t still depend on what comes after t?
#
# **Exercise 2b.** Write the test. `function` maps an array (T, D) to an array (T, ...);
# return the largest absolute change of an output row before `changed` when row
# `changed` of `inputs` is replaced by something else.
#
# <details><summary>Hint</summary>
#
# Copy the inputs before you change them. `values.max(initial=0.0)` also works where
# there is no row before the changed one.
#
# </details>


# %%
def largest_leak(function, inputs, changed):
    """How far outputs before position `changed` move when that row is replaced."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def largest_leak(function, inputs, changed):
#     """How far outputs before position `changed` move when that row is replaced."""
#     other = inputs.copy()
#     other[changed] = other[changed] + 1.0
#     moved = np.abs(function(other) - function(inputs))
#     return moved[:changed].max(initial=0.0)
# ```
#
# </details>

# %%
leak_of = checkpoints.largest_leak(largest_leak)

# %%
random = np.random.default_rng(1)
inputs = random.standard_normal((8, 16)).astype("float32")
queries, keys = random.standard_normal((2, 16, 16)).astype("float32") / 4  # projections
mask = numpy(make_mask(8))


def unmasked(x):
    return numpy(attend(x @ queries, x @ keys, x)[1])


def zeroed(x):
    return unmasked(x) * mask


def masked(x):
    return numpy(attend(x @ queries, x @ keys, x, mask)[1])


print("weights             largest above the diagonal  largest |row sum - 1|  leak")
for weights_of in (unmasked, zeroed, masked):
    above, off = audit(weights_of(inputs)[None, None], mask[None])

    def outputs_of(x, weights_of=weights_of):
        return weights_of(x) @ x

    leak = max(float(leak_of(outputs_of, inputs, row)) for row in range(1, 8))
    print(f"{weights_of.__name__:<18}  {above:>26.3g}  {off:>21.2g}  {leak:.3g}")


# %%
def plot_masks(path):
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    titles = ("no mask", "set to 0 after the softmax", "masked before the softmax")
    panels = figure.subplots(1, 3)
    for axes, title, weights_of in zip(
        panels, titles, (unmasked, zeroed, masked), strict=True
    ):
        image = axes.imshow(weights_of(inputs), cmap=matplotlib.colormaps["Blues"])
        image.set_clim(0, 1)
        axes.set_title(title)
        axes.set_xlabel("read: position i")
        axes.set_ylabel("reading: position t")
    figure.colorbar(image, ax=panels, label="weight")
    plots.save_figure(figure, path)


show(plot_masks)

# %% [markdown]
# <details><summary>After the predictions</summary>
#
# A model that reads the next token copies it: its loss falls towards 0, and it can
# write nothing, because there is no next token to read yet.
#
# Zeroed weights still leak. The weights that are left were divided by a sum that
# contains the scores of later positions, so they move when the future does, and the
# rows no longer sum to 1. A look at the triangle does not see it; the leak test does.
# Masked before the softmax, the change is exactly 0.
#
# </details>

# %% [markdown]
# ## 3 Positions
#
# Attention is a sum over what may be read: nothing in it says where a key stood. The
# model is told by a vector per position that is added to the vector of the token:
# $h_t = e_{w_t} + p_t$.
#
# **Predict first.** The shuffle test: the tokens before the last one change places, the
# last one stays. Does the output at the last position stay the same with one layer of
# causal attention? With two? And once positions are added?
#
# **Exercise 3.** Write the input of the model with two tables.
#
# <details><summary>Hint</summary>
#
# `ops.take(table, ids, axis=0)` picks rows of a table. The first T rows of the position
# table belong to the T positions, whatever the tokens are.
#
# </details>


# %%
def embed(ids, token_table, position_table):
    """Vectors (B, T, D) of ids (B, T), from tables (V, D) and (T_max, D)."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def embed(ids, token_table, position_table):
#     """Vectors (B, T, D) of ids (B, T), from tables (V, D) and (T_max, D)."""
#     tokens = ops.take(token_table, ids, axis=0)
#     positions = ops.take(position_table, np.arange(ids.shape[1]), axis=0)
#     return tokens + positions
# ```
#
# </details>

# %%
place = checkpoints.embed(embed)

# %%
keras.utils.set_random_seed(0)
token_table = np.random.default_rng(2).standard_normal((6, 16)).astype("float32")
position_table = np.random.default_rng(3).standard_normal((6, 16)).astype("float32")
layers = [tg.layers.CausalMultiHeadAttention(num_heads=2) for _ in range(2)]


def last_output(ids, layers, positions):
    x = place(np.array([ids]), token_table, positions)
    for layer in layers:
        x = layer(x)
    return numpy(x)[0, -1]


print("layers  positions  change of the last output")
for depth in (1, 2):
    for name, table in (("none", 0 * position_table), ("added", position_table)):
        first = last_output([0, 1, 2, 3, 4, 5], layers[:depth], table)
        other = last_output([3, 0, 4, 2, 1, 5], layers[:depth], table)
        print(f"{depth:>6}  {name:<9}  {np.abs(first - other).max():.1e}")

# %% [markdown]
# <details><summary>After the prediction</summary>
#
# Only one layer without positions treats what it reads as a set (up to the rounding of
# a sum in another order). With two layers the mask itself lets order in: what the first
# layer made of a token depends on which tokens stood before it. That signal is weak:
# `tinygpt study book` measures what a GPT without positions loses.
#
# </details>

# %% [markdown]
# ## 4 Training
#
# Every position's prediction is scored against the token that follows; the loss is the
# mean of minus the natural logarithm of its probability, in nats. Perplexity is exp of
# it: the number of equally likely characters that would be as hard to guess.
#
# **Predict first.** What does a model lose that knows nothing and gives all V
# characters the same probability?
#
# **Exercise 4.** Write the loss and the perplexity.
#
# <details><summary>Hint</summary>
#
# Log-probabilities are the logits minus the logarithm of the sum of their exponentials:
# `ops.logsumexp(logits, axis=-1)` does not overflow. `ops.take_along_axis(logits,
# targets[..., None], axis=-1)` picks the targets' logits.
#
# </details>


# %%
def score(logits, targets):
    """Mean nats and perplexity of logits (B, T, V) on targets (B, T)."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def score(logits, targets):
#     """Mean nats and perplexity of logits (B, T, V) on targets (B, T)."""
#     chosen = ops.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
#     losses = ops.logsumexp(logits, axis=-1) - chosen  # (B, T)
#     nats = float(ops.mean(losses))
#     return nats, math.exp(nats)
# ```
#
# </details>

# %%
score_of = checkpoints.score(score)

# %% [markdown]
# The untrained GPT: its loss on some windows of the held-out part, and the leak test on
# the whole model.

# %%
gpt = tg.build_gpt(gpt_config, seed=0)
window = gpt_config.max_sequence_length
starts = np.arange(16)[:, None] * window
windows = parts["valid"][starts + np.arange(window + 1)].astype("int32")
nats, perplexity = score_of(numpy(gpt(windows[:, :-1])), windows[:, 1:])
print(
    f"untrained: {nats:.4f} nats, perplexity {perplexity:.2f}; ln V = {math.log(V):.4f}"
)
checkpoints.untrained(nats, V, tg.inspection.leak_test(gpt))

# %% [markdown]
# Now both models are trained on the same text, and counts of three and of five
# characters are the baseline. The budgets differ and are printed: read every loss
# beside its parameters, steps and seconds. The LSTM carries its state across the whole
# test part; the GPT reads overlapping windows, of which only the second half is scored.
#
# **Predict first.** Your guess of the test loss in nats, for all four:

# %%
predicted_nats = {"3-gram": None, "5-gram": None, "LSTM": None, "GPT": None}

# %%
scored = {"test": parts["test"]}
rows = runs.count_ngrams({"train": parts["train"], **scored}, V)
histories = {}
lstm, gpt = tg.build_lstm(lstm_config, seed=0), tg.build_gpt(gpt_config, seed=0)
for name, model, training in (
    ("LSTM", lstm, lstm_training),
    ("GPT", gpt, gpt_training),
):
    result = tg.train(model, parts["train"], parts["valid"], training, verbose=FULL)
    scores = {"test": tg.evaluate(model, parts["test"])}
    histories[name] = result.history
    rows.append(
        runs.Row(
            f"{name}, batches of {training.batch_size}",
            model.count_params(),
            training.steps,
            result.seconds,
            scores,
        )
    )
runs.print_table(rows)
print("\nyour guesses:", predicted_nats)

# %%
baselines = {
    f"{row.name}, test part": row.scores["test"].nats
    for row in rows
    if row.steps is None
}
show(
    plots.plot_history, histories, baselines=baselines, title=f"Training, {corpus.name}"
)
unigram = tg.NGram(1, 0.1, V).fit(parts["train"]).nats(parts["test"])
checkpoints.trained(
    {row.name: row.scores["test"].nats for row in rows if row.steps is not None},
    baseline=unigram,
    leak=tg.inspection.leak_test(gpt),
)

# %%
start = tokenizer.decode(parts["test"]).find("\n") + 1  # of a line
line = parts["test"][start : start + min(32, window)]
text = tg.generate(gpt, line, 120, temperature=0.8, seed=0, use_cache=False)
print(tokenizer.decode(line), tokenizer.decode(text[len(line) :]), sep="|")

# %% [markdown]
# <details><summary>What the table does and does not say</summary>
#
# The checkpoint asks only that each model beats the frequencies of single characters,
# and that training opened no leak. Which of the two is ahead depends on the budget: at
# a few hundred small steps the LSTM learns faster and counts are hard to beat, while in
# the full mode both pass the counts and come close to each other. One seed at one
# budget is no ranking; `tinygpt study mini --seeds 3` repeats the comparison.
#
# </details>

# %% [markdown]
# ## 5 Heads
#
# **Predict first.** Some heads read mostly the character just before, others spread
# over the window. In which block do you expect the larger distances?
#
# **Exercise 5.** The mean attention distance of a head: how far back, t - i, a query
# reads on average, weighted by its weights, and then the mean over the queries. The
# first query has nothing but itself to read and is left out.
#
# <details><summary>Hint</summary>
#
# Make the (T, T) array of t - i by subtracting `np.arange(T)` from a column of it.
#
# </details>


# %%
def mean_distance(weights):
    """Mean distance (...) of heads with weights (..., T, T)."""
    raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def mean_distance(weights):
#     """Mean distance (...) of heads with weights (..., T, T)."""
#     places = np.arange(weights.shape[-1])
#     back = places[:, None] - places  # (T, T), how far key i is behind query t
#     rows = np.sum(weights * back, axis=-1)  # (..., T)
#     return rows[..., 1:].mean(axis=-1)
# ```
#
# </details>

# %%
distance_of = checkpoints.mean_distance(mean_distance)

# %%
maps = tg.inspection.attention_maps(gpt, line)
print(maps)
labels = [tokenizer.decode([token]) for token in line.tolist()]
title = "The first and the last block on a line of the test part"
show(figures.plot_attention, maps.weights, labels, title=title)
print("mean distance on this line, a row a block, a column a head:")
print(np.round(numpy(distance_of(maps.weights)), 2))

# %% [markdown]
# One line is an anecdote. The same averages over many windows:

# %%
metrics = tg.inspection.head_metrics(gpt, parts["test"], max_windows=64)
show(figures.plot_heads, metrics)
print(metrics.table())

# %% [markdown]
# A map shows where a head reads. It is not the reason for a prediction: the vectors
# that are read are mixtures already, and other heads read too. The last experiment
# below measures the difference.

# %% [markdown]
# ## Stretch: the layer and the block
#
# **Predict first.** A layer of 3 heads and one of a single head, both of width 12:
# which of their tensors differ in shape?
#
# **Stretch 1.** Complete `call`. Project, cut the D columns into N heads of H, attend
# with the causal mask, put the heads side by side again and project. `attend` and
# `make_mask` are yours if you did exercises 1 and 2.
#
# <details><summary>Hint</summary>
#
# (B, T, D) becomes (B, T, N, H) by a reshape and (B, N, T, H) by a transpose. The way
# back is the transpose first. A reshape alone would put numbers of different positions
# into one row.
#
# </details>


# %%
class MyMultiHeadAttention(keras.layers.Layer):
    """Causal multi-head attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, num_heads, hidden_dim):
        super().__init__()
        self.num_heads = num_heads
        self.query = keras.layers.Dense(hidden_dim, use_bias=False)
        self.key = keras.layers.Dense(hidden_dim, use_bias=False)
        self.value = keras.layers.Dense(hidden_dim, use_bias=False)
        self.projection = keras.layers.Dense(hidden_dim)

    def call(self, inputs):
        raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# class MyMultiHeadAttention(keras.layers.Layer):
#     """Causal multi-head attention: (B, T, D) -> (B, T, D)."""
#
#     def __init__(self, num_heads, hidden_dim):
#         super().__init__()
#         self.num_heads = num_heads
#         self.query = keras.layers.Dense(hidden_dim, use_bias=False)
#         self.key = keras.layers.Dense(hidden_dim, use_bias=False)
#         self.value = keras.layers.Dense(hidden_dim, use_bias=False)
#         self.projection = keras.layers.Dense(hidden_dim)
#
#     def split(self, x):
#         batch, length, width = x.shape
#         x = ops.reshape(x, (batch, length, self.num_heads, width // self.num_heads))
#         return ops.transpose(x, (0, 2, 1, 3))  # (B, N, T, H)
#
#     def call(self, inputs):
#         query = self.split(self.query(inputs))
#         key = self.split(self.key(inputs))
#         value = self.split(self.value(inputs))
#         outputs, _ = attend(query, key, value, make_mask(inputs.shape[1]))
#         outputs = ops.transpose(outputs, (0, 2, 1, 3))  # (B, T, N, H)
#         return self.projection(ops.reshape(outputs, inputs.shape))
# ```
#
# </details>

# %%
MultiHead = checkpoints.multi_head(MyMultiHeadAttention)

# %% [markdown]
# **Predict first.** Which of the two additions of a block could be left out without
# breaking the shapes?
#
# **Stretch 2.** Complete `call` of the pre-norm block: each half reads a normalised
# copy of the stream and adds what it found. The nonlinearity is GELU, `ops.gelu`.
#
# <details><summary>Hint</summary>
#
# Two lines, x = x + attention(norm(x)) and x = x + feed-forward(norm(x)); the second
# reads what the first has left.
#
# </details>


# %%
class MyBlock(keras.layers.Layer):
    """A pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, num_heads, hidden_dim):
        super().__init__()
        self.attention_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.attention = tg.layers.CausalMultiHeadAttention(num_heads)
        self.feed_forward_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.widen = keras.layers.Dense(4 * hidden_dim)
        self.narrow = keras.layers.Dense(hidden_dim)

    def call(self, inputs):
        raise NotImplementedError


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# class MyBlock(keras.layers.Layer):
#     """A pre-norm transformer block: (B, T, D) -> (B, T, D)."""
#
#     def __init__(self, num_heads, hidden_dim):
#         super().__init__()
#         self.attention_norm = keras.layers.LayerNormalization(epsilon=1e-5)
#         self.attention = tg.layers.CausalMultiHeadAttention(num_heads)
#         self.feed_forward_norm = keras.layers.LayerNormalization(epsilon=1e-5)
#         self.widen = keras.layers.Dense(4 * hidden_dim)
#         self.narrow = keras.layers.Dense(hidden_dim)
#
#     def call(self, inputs):
#         x = inputs + self.attention(self.attention_norm(inputs))
#         hidden = ops.gelu(self.widen(self.feed_forward_norm(x)))
#         return x + self.narrow(hidden)
# ```
#
# </details>

# %%
Block = checkpoints.block(MyBlock)

# %% [markdown]
# <details><summary>After the predictions</summary>
#
# No weight differs in shape, and neither do inputs and outputs; the queries, keys and
# values as heads do, and the weights of attention: (B, 3, T, T) against (B, 1, T, T).
# Both additions could be left out without an error, which is why the checkpoint
# compares numbers.
#
# </details>

# %% [markdown]
# ## More experiments
#
# Nothing to write here; predict, run, explain. They use the package's own functions,
# and none needs the others.
#
# ### A sabotaged mask
#
# The mask is transposed: every position reads itself and what comes **after** it. Which
# is the first pair of a query and a key that must not be read? Which position does the
# leak test of the whole model name? And how far do the row sums of a mask that comes
# after the softmax fall short?

# %%
upper = ~np.tri(6, k=-1, dtype="bool")  # the transposed mask
tokens = keras.Input((6,), dtype="int32")
x = keras.layers.Embedding(11, 12)(tokens)
sabotaged = tg.layers.CausalMultiHeadAttention(num_heads=2, causal=False)
x, weights = sabotaged(x, attention_mask=upper, return_attention_scores=True)
model = keras.Model(tokens, keras.layers.Dense(11)(x))
maps_of = keras.Model(tokens, weights)

weights = numpy(maps_of(np.array([[3, 1, 4, 1, 5, 9]])))  # (1, N, T, T)
lower = upper.T
leaked = np.argwhere((weights[0].max(axis=0) > 0) & ~lower)
print(f"first leaked pair: query {leaked[0][0]} reads key {leaked[0][1]}")
print("leak test:", tg.inspection.leak_test(model, length=6))
cut = unmasked(inputs) * mask
print("row sums after zeroing behind the softmax:", np.round(cut.sum(axis=-1), 3))

# %% [markdown]
# ### A table or a formula
#
# The same GPT with sinusoidal positions: the tensors that both models have start equal,
# and both see the same windows. Which has the lower loss? Then both read windows twice
# as long as those they were trained on. The formula simply goes on; the table has no
# rows there and needs a rule, which must be chosen **before** looking: `repeated` uses
# the rows again from the first, `stretched` spreads them over the longer window.

# %%
formula_config = dataclasses.replace(gpt_config, positions="sinusoidal")
formula = tg.build_gpt(formula_config, seed=0)
result = tg.train(formula, parts["train"], parts["valid"], gpt_training, verbose=FULL)
for name, model in (("learned", gpt), ("sinusoidal", formula)):
    print(f"{name}: {tg.evaluate(model, parts['test']).nats:.4f} nats on the test part")

readers = {"sinusoidal": formula}
for rule in context.EXTENSION_RULES:
    readers[f"learned, {rule}"] = context.extend_positions(gpt, 2 * window, rule)
by_context = {
    name: context.binned(losses_by_position(model, parts["test"], 2 * window, 16))
    for name, model in readers.items()
}
show(
    plots.plot_lines,
    {name: list(means.values()) for name, means in by_context.items()},
    [int(place) for place in by_context["sinusoidal"]],
    labels=("tokens of context, up to", "test loss (nats per token)"),
    title=f"Trained on windows of {window} tokens",
)

# %% [markdown]
# ### Offsets, and what a weight is worth
#
# The mean weight by how far back it reads, over the windows of the test part: a head is
# a distribution, not one picture.

# %%
show(figures.plot_profiles, metrics)

# %% [markdown]
# A weight says how much of a value vector is mixed in. Here the value vector of one key
# is taken away from one head and the change of the logits measured, for each key in
# turn. Does the key with the largest weight have the largest effect? Predict it for the
# first and for the last block.

# %%
causes = tg.inspection.causes(gpt, line[:24])
show(figures.plot_causes, causes)
same = causes.weights[..., -1, :].argmax(-1) == causes.effects[..., -1, :].argmax(-1)
print(
    f"last query: the largest weight is the largest effect in {same.sum()} of ", end=""
)
print(f"{same.size} heads; by block: {same.sum(axis=-1).tolist()}")
print("rank correlation of weight and effect, a row a block:")
print(np.round(causes.correlation, 2))

# %% [markdown]
# <details><summary>Why they need not agree</summary>
#
# The effect is the weight times the size of the value vector, sent through the output
# projection; vectors of different heads can cancel, and the blocks above read the
# change on. In the last block almost nothing follows, so there the two agree by
# construction.
#
# </details>
