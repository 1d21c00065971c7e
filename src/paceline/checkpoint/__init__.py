"""What a run is on disk.

RUN/settings.yaml       the resolved settings; `paceline train RUN/settings.yaml` starts the same run again
RUN/provenance.json     versions, argv, target and dataset fingerprints
RUN/events.jsonl        what happened, one event a line
RUN/checkpoints/        states to go on from (see store)
RUN/drafter/            the drafter's weights (float32) and what is needed to build it again
RUN/.lock               the process that trains into the folder, while it does
"""
