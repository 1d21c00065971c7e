"""What a run tells: events, console, files."""
