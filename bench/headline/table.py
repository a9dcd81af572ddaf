"""The table of a headline run: rows are dictionaries, written as Markdown for people and as JSON for programs."""

GIB = 2 ** 30
# Goals (ROADMAP.md): how many times a peer's tokens a second; how far the plan may be off.
GOALS = {"Hugging Face eager": 2.21, "torch expert parallelism": 1.4}
PLAN_GOALS = {"memory": 0.05, "time": 0.15}
COLUMNS = ("", "tokens", "sequence", "tokens/s, rank", "ms", "MFU", "peak GiB", "all-to-all", "planned ms",
           "planned GiB", "")


def number(value, form="{:,.0f}"):
    return "" if value is None else form.format(value)


def beside(value, measured, form):
    """A predicted value, and how far it is from the measured one."""
    if value is None:
        return ""
    if not measured:
        return form.format(value)
    return f"{form.format(value)} ({(value - measured) / measured:+.0%})"


def cells(row):
    if row.get("failed"):
        verdict = "not run" if row.get("unfit") else "FAILED"
        return [row["what"], str(row["tokens"]), str(row["sequence"]), verdict, "", "", "", "",
                beside(row.get("plan_ms"), None, "{:.1f}"), "", row["failed"]]
    peak = row["peak_bytes"] / GIB if row.get("peak_bytes") else None
    planned = row["plan_bytes"] / GIB if row.get("plan_bytes") else None
    return [row["what"], str(row["tokens"]), str(row["sequence"]), number(row.get("tokens_per_s_rank")),
            number(row.get("ms"), "{:.1f}"), number(row.get("mfu"), "{:.0%}"), number(peak, "{:.2f}"),
            number(row.get("all_to_all"), "{:.0%}"), beside(row.get("plan_ms"), row.get("ms"), "{:.1f}"),
            beside(planned, peak, "{:.2f}"), row.get("note", "")]


def markdown(rows):
    lines = [COLUMNS, *map(cells, rows)]
    used = [i for i in range(len(COLUMNS)) if COLUMNS[i] or any(line[i] for line in lines)]
    lines = [[line[i] for i in used] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def ratios(rows, goals):
    """For every shape the fastest layout beside each peer: a list of {tokens, sequence, layout, peer, ratio, goal}."""
    result = []
    done = [row for row in rows if not row.get("failed")]
    for shape in dict.fromkeys((row["tokens"], row["sequence"]) for row in done):
        there = [row for row in done if (row["tokens"], row["sequence"]) == shape]
        ours = [row for row in there if not row.get("peer")]
        if not ours:
            continue
        best = max(ours, key=lambda row: row["tokens_per_s_rank"])
        for peer in there:
            if peer.get("peer"):
                result.append({"tokens": shape[0], "sequence": shape[1], "layout": best["what"], "peer": peer["what"],
                               "ratio": best["tokens_per_s_rank"] / peer["tokens_per_s_rank"],
                               "goal": goals.get(peer["what"])})
    return result


def ratio_text(ratio):
    text = (f"{ratio['tokens']} tokens, sequence {ratio['sequence']}: {ratio['layout']} is {ratio['ratio']:.2f} times "
            f"{ratio['peer']}")
    if ratio["goal"]:
        text += f" (goal {ratio['goal']}: {'met' if ratio['ratio'] >= ratio['goal'] else 'missed'})"
    return text


def plan_text(rows):
    """How far predictions were off, at most; empty where nothing was predicted."""
    parts = []
    for what, planned, measured in (("memory", "plan_bytes", "peak_bytes"), ("time", "plan_ms", "ms")):
        off = [(abs(row[planned] - row[measured]) / row[measured], row) for row in rows
               if not row.get("failed") and row.get(planned) and row.get(measured)]
        if off:
            most, row = max(off, key=lambda pair: pair[0])
            parts.append(f"{what} by at most {most:.1%} ({row['what']}, {row['tokens']} tokens; goal "
                         f"{PLAN_GOALS[what]:.0%}: {'met' if most <= PLAN_GOALS[what] else 'missed'})")
    return "plan is off in " + " and in ".join(parts) if parts else ""
