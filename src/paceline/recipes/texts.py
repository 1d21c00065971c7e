"""What a person reads when a verb is done. Free of torch."""

from pathlib import Path
from typing import Any

from paceline.recipes.evaluate_texts import evaluation_text


def exported_text(summary: dict[str, Any]) -> str:
    """Return what `export` wrote."""
    folders = summary.get("folders", [summary])
    lines = [
        f"Wrote {told['parameters']:,} parameters ({told['dtype']}, {told['format']} layout) to {told['folder']}; read "
        "back equal."
        for told in folders
    ]
    if folders[0]["evaluation"] is None:
        lines.append("The model card gives no acceptance: `paceline evaluate` was not run on these weights.")
    return "\n".join(lines)


def demo_text(report: dict[str, Any], run_dir: Path) -> str:
    """Return what `demo` measured, and where everything is."""
    return "\n".join(
        [
            "",
            f"untrained acceptance length {report['tau_untrained']:.2f}",
            evaluation_text(report),
            f"{report['train_steps']} steps, {report['wall_s']:.0f} s, {report['peak_rss_gib']:.1f} GiB",
            f"report   {run_dir / 'report.json'}",
            f"drafter  {run_dir / 'drafter'}",
            f"export   {report['export_dir']}",
            f"events   {run_dir / 'events.jsonl'}",
        ]
    )


def prepared_text(summary: dict[str, Any]) -> str:
    """Return what became of the rows of `prepare`."""
    lines = [
        f"{'Found' if summary['found'] else 'Wrote'} {summary['rows']:,} rows, {summary['tokens']:,} tokens "
        f"({summary['supervised_share']:.0%} supervised) in {summary['dataset']}."
    ]
    if summary["truncated"]:
        lines.append(
            f"Truncated {summary['truncated']:,} rows: {summary['tokens_cut']:,} tokens lost, "
            f"{summary['supervised_cut']:,} of them supervised."
        )
    if summary["quarantined"]:
        refused = sum(summary["quarantined"].values())
        where = f" in {summary['quarantine']}" if summary["quarantine"] else ""
        lines.append(f"Quarantined {refused:,} of {summary['rows_read']:,} rows{where}:")
        lines += [f"  {count:,} {reason}" for reason, count in summary["quarantined"].items()]
    return "\n".join(lines)


def generated_text(summary: dict[str, Any]) -> str:
    """Return what came of the prompts of `generate`."""
    lines = [
        f"Finished {summary['conversations']:,} conversations in {summary['completions']}"
        + (f"; {summary['found']:,} of them earlier." if summary["found"] else "."),
        f"{summary['rows']:,} rows, {summary['tokens_generated']:,} tokens; {summary['stopped']:,} answers stopped, "
        f"{summary['cut_at_max_new_tokens']:,} were cut.",
    ]
    if summary["loops"]:
        lines.append(f"{summary['loops']:,} rows have an answer that ends in a loop.")
    if summary["retokenized"]:
        lines.append(f"{summary['retokenized']:,} rows have ids that were made of text.")
    if summary["turns_not_asked"]:
        lines.append(f"{summary['turns_not_asked']:,} questions were not asked: their conversations ended before.")
    if summary["retried"]:
        lines.append(f"{summary['retried']:,} refused before were asked once more.")
    if summary["quarantined"]:
        lines.append(f"Quarantined {sum(summary['quarantined'].values()):,} in quarantine-*.jsonl there:")
        lines += [f"  {count:,} {reason}" for reason, count in summary["quarantined"].items()]
    return "\n".join(lines)
