"""Results as small JSON files, and README tables rendered from them.

A results file holds its kind, the command behind it, rows and versions: those of
studies are written by `tinygpt study`, those of benchmarks by the scripts in
`examples/`. The README has a pair of comment lines around each table, naming the file:

    <!-- results: mini -->
    <!-- end of results -->
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from keras_tinygpt.studies.study import by_name, paired_differences, spread

MARKED = re.compile(
    r"(<!-- results: (?P<name>\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL
)


def speed_table(results: dict[str, Any]) -> str:
    """A Markdown table of tokens per second by contender and batch size."""
    batches = list(results["rows"][0]["tokens_per_second"])
    lines = [
        "| | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
        "|---|" + "---|" * len(batches),
    ]
    for row in results["rows"]:
        rates = [row["tokens_per_second"][batch] for batch in batches]
        lines.append(f"| {row['name']} | {' | '.join(f'{x:,}' for x in rates)} |")
    return "\n".join([*lines, "", *_benchmark_footer(results)])


def context_table(results: dict[str, Any]) -> str:
    """A Markdown table of tokens per second by context length."""
    lines = ["| context | cached | plain loop | ratio |", "|---|---|---|---|"]
    for row in results["rows"]:
        ratio = row["cached"] / row["plain"]
        lines.append(
            f"| {row['context']:,} | {row['cached']:,} | {row['plain']:,} "
            f"| {ratio:,.0f} |"
        )
    return "\n".join([*lines, "", *_benchmark_footer(results)])


def plain_table(results: dict[str, Any]) -> str:
    """A Markdown table of the given columns and rows."""
    lines = [f"| {' | '.join(results['columns'])} |", "|---" * len(results["columns"])]
    lines[1] += "|"
    lines += [f"| {' | '.join(map(str, row))} |" for row in results["rows"]]
    return "\n".join([*lines, "", *_benchmark_footer(results)])


def study_table(results: dict[str, Any]) -> str:
    """A Markdown table of a study: budgets, mean scores, paired differences."""
    groups, differences = by_name(results), paired_differences(results)
    parts = list(next(iter(groups.values()))[0]["scores"])
    first = next(iter(groups))
    lines = [
        "| model | parameters | steps x batch | seconds | "
        + " | ".join(f"{part} nats" for part in parts)
        + f" | perplexity | bits | {parts[-1]} nats less {first} |",
        "|---" * (7 + len(parts)) + "|",
    ]
    for name, rows in groups.items():
        training = rows[0]["training"]
        nats = [[row["scores"][part]["nats"] for row in rows] for part in parts]
        mean = sum(nats[-1]) / len(rows)
        paired = "; ".join(f"{value:+.3f}" for value in differences[name].values())
        lines.append(
            f"| {name} | {rows[0]['parameters']:,} "
            f"| {training['steps']:,} x {training['batch_size']} "
            f"| {sum(row['seconds'] for row in rows) / len(rows):,.0f} "
            f"| {' | '.join(map(spread, nats))} | {math.exp(mean):.2f} "
            f"| {mean / math.log(2):.2f} | {'' if name == first else paired} |"
        )
    for name, scores in results["ngrams"].items():
        cells = [
            f"{scores[part]['nats']:.4f}" if part in scores else "" for part in parts
        ]
        last = scores[parts[-1]]
        lines.append(
            f"| {name} | counts | | | {' | '.join(cells)} | {last['perplexity']:.2f} "
            f"| {last['bits_per_token']:.2f} | |"
        )
    seeds = sorted({len(rows) for rows in groups.values()})
    note = f"Seeds: {' or '.join(map(str, seeds))} a row"
    note += ", mean ± standard deviation" * (seeds[-1] > 1)
    return "\n".join(
        [*lines, "", f"`{results['command']}`", "", f"{note}. {_machines(groups)}"]
    )


def reversal_table(results: dict[str, Any]) -> str:
    """A Markdown table of exact match by temperature and of the reversal heads."""
    temperatures = list(results["rows"][0]["exact_match"])
    lines = [
        "| seed | seconds | "
        + " | ".join(f"temperature {float(t):g}" for t in temperatures)
        + " | reversal heads: weight on the copied token, entropy in nats | others |",
        "|---" * (4 + len(temperatures)) + "|",
    ]
    for row in results["rows"]:
        named = {True: [], False: []}
        for head in row["heads"]:
            named[head["reversal"]].append(
                f"{head['block']}.{head['head']}: {head['copied']:.2f}, "
                f"{head['entropy']:.2f}"
            )
        shares = " | ".join(f"{row['exact_match'][t]:.1%}" for t in temperatures)
        lines.append(
            f"| {row['seed']} | {row['seconds']:.0f} | {shares} "
            f"| {'; '.join(named[True])} | {'; '.join(named[False])} |"
        )
    return "\n".join(
        [*lines, "", f"`{results['command']}`", "", _machine(results["versions"])]
    )


def context_study_table(results: dict[str, Any]) -> str:
    """A Markdown table of losses past the window, and one of costs."""
    rows, cost = results["rows"], results["cost"]
    windows = list(rows[0]["nats"])
    lines = ["| window of | " + " | ".join(windows) + " |"]
    lines.append("|---" * (1 + len(windows)) + "|")
    for row in rows:
        cells = [f"{row['nats'].get(window, math.nan):.3f}" for window in windows]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    lines += ["", "| tokens | GPT step, ms | predicted growth | measured growth "]
    lines[-1] += "| one attention layer, ms | LSTM step, ms |"
    lines.append("|---" * 6 + "|")
    for row in cost:
        lines.append(
            f"| {row['length']:,} | {1e3 * row['gpt']:.1f} "
            f"| {row['products'] / cost[0]['products']:.1f} "
            f"| {row['gpt'] / cost[0]['gpt']:.1f} "
            f"| {1e3 * row['attention']:.1f} | {1e3 * row['lstm']:.1f} |"
        )
    return "\n".join(
        [*lines, "", f"`{results['command']}`", "", _machine(results["versions"])]
    )


TABLES = {
    "reversal": reversal_table,
    "context": context_study_table,
    "study": study_table,
    "table": plain_table,
    "generation_speed": speed_table,
    "generation_context": context_table,
}


def _benchmark_footer(results: dict[str, Any]) -> list[str]:
    setting = results["setting"][0].upper() + results["setting"][1:] + ". "
    machine = _machine(results["versions"], results.get("cores", 2))
    return [f"`{results['command']}`", "", setting + machine]


def _machine(versions: dict[str, str], cores: int = 2) -> str:
    counted = {1: "One CPU core", 2: "Two CPU cores"}.get(cores, f"{cores} CPU cores")
    return f"{counted}; {_listed(versions)}."


def _machines(groups: dict[str, list[dict[str, Any]]]) -> str:
    """What the models were trained with, told once for those alike."""
    alike: dict[str, list[str]] = {}
    for name, rows in groups.items():
        setting = f"{rows[0]['precision']}, {_listed(rows[0]['versions'])}"
        alike.setdefault(setting, []).append(name)
    if len(alike) == 1:
        return f"Two CPU cores; {next(iter(alike))}."
    told = "; ".join(f"{', '.join(names)}: {text}" for text, names in alike.items())
    return f"Two CPU cores; {told}."


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def render_readme(text: str, results_folder: Path) -> str:
    """Returns the README text with every marked table rendered anew."""

    def table(match: re.Match) -> str:
        path = results_folder / f"{match['name']}.json"
        results = json.loads(path.read_text("utf-8"))
        return f"{match[1]}{TABLES[results['kind']](results)}\n{match[3]}"

    return MARKED.sub(table, text)
