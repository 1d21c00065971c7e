"""What a person reads when a verb is done. Free of torch."""

from pathlib import Path
from typing import Any

from paceline.recipes.evaluate_texts import evaluation_text
from paceline.records import many


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
            f"{many(report['train_steps'], 'step')}, {report['wall_s']:.0f} s, {report['peak_rss_gib']:.1f} GiB",
            f"report   {run_dir / 'report.json'}",
            f"drafter  {run_dir / 'drafter'}",
            f"export   {report['export_dir']}",
            f"events   {run_dir / 'events.jsonl'}",
        ]
    )


def prepared_text(summary: dict[str, Any]) -> str:
    """Return what became of the rows of `prepare`."""
    lines = [
        f"{'Found' if summary['found'] else 'Wrote'} {many(summary['rows'], 'row')}, {summary['tokens']:,} tokens "
        f"({summary['supervised_share']:.0%} supervised) in {summary['dataset']}."
    ]
    if summary["truncated"]:
        lines.append(
            f"Truncated {many(summary['truncated'], 'row')}: {many(summary['tokens_cut'], 'token')} lost, "
            f"{summary['supervised_cut']:,} of them supervised."
        )
    if summary["quarantined"]:
        refused = sum(summary["quarantined"].values())
        where = f" in {summary['quarantine']}" if summary["quarantine"] else ""
        lines.append(f"Quarantined {refused:,} of {many(summary['rows_read'], 'row')}{where}:")
        lines += [f"  {count:,} {reason}" for reason, count in summary["quarantined"].items()]
    return "\n".join(lines)


def generated_text(summary: dict[str, Any]) -> str:
    """Return what came of the prompts of `generate`."""
    lines = [
        f"Finished {many(summary['conversations'], 'conversation')} in {summary['completions']}"
        + (f"; {summary['found']:,} of them earlier." if summary["found"] else "."),
        f"{many(summary['rows'], 'row')}, {summary['tokens_generated']:,} tokens; "
        f"stopped: {many(summary['stopped'], 'answer')}, "
        f"cut: {summary['cut_at_max_new_tokens']:,}.",
    ]
    if summary["loops"]:
        lines.append(f"Answers that end in a loop: {many(summary['loops'], 'row')}.")
    if summary["retokenized"]:
        lines.append(f"Ids that were made of text: {many(summary['retokenized'], 'row')}.")
    if summary["turns_not_asked"]:
        lines.append(f"Not asked, since the conversation ended before: {many(summary['turns_not_asked'], 'question')}.")
    if summary["retried"]:
        lines.append(f"Refused before and asked once more: {summary['retried']:,}.")
    if summary["quarantined"]:
        lines.append(f"Quarantined {sum(summary['quarantined'].values()):,} in quarantine-*.jsonl there:")
        lines += [f"  {count:,} {reason}" for reason, count in summary["quarantined"].items()]
    return "\n".join(lines)
