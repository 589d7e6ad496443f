"""`minimegatron watch RUN [RUN2]`: a page that shows a run while it trains, on this machine alone.

    minimegatron train ... --log-file runs/a/run.jsonl &
    minimegatron watch runs/a
    minimegatron watch runs/a runs/b/run.jsonl

A run is the file of `--log-file`, or its folder, also a copy from another machine. The page shows it while it trains,
after it has ended, and across interruptions. It reads the file and nothing else: no run is slower for it, and no
request leaves this machine.

What a log has depends on flags of `train`: `--log-norms-interval N` norms by layer, `--log-timeline-interval N` the
timeline of a step, `--log-memory-interval N` memory by owner, counted. The page says which it misses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minimegatron.errors import ConfigError
from minimegatron.flags import Parser
from minimegatron.watch.log import RunLog, find_log
from minimegatron.watch.predicted import Predictor
from minimegatron.watch.server import Server, Watched


def main(argv: Sequence[str] | None = None) -> int:
    """The command; Ctrl-C ends it.

    Raises:
        ConfigError, DataError: no such run, a port that is taken.
    """
    parser = Parser("minimegatron watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a log file, or its folder; two are drawn together")
    parser.add_argument("--port", type=int, default=7070, help="on 127.0.0.1; 0: any free one (default: %(default)s)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--cluster", metavar="NAME|FILE.json", help="rates for the predicted time, as `plan` takes them"
    )
    parser.add_argument("--no-plan", action="store_true", help="predict nothing: the planner takes seconds, once")
    args = parser.parse_args(argv)
    if len(args.runs) > 2:
        raise ConfigError(f"{len(args.runs)} runs", fix="one, or two beside each other")
    logs = [RunLog(find_log(run)) for run in args.runs]
    for log in logs:
        log.read(0.0)  # says at once if it may not be read
    predictor = None if args.no_plan else Predictor(args.cluster)
    with Server(Watched(logs, predictor), args.port) as server:
        print(
            f"watching {' and '.join(str(log.path) for log in logs)}: {server.address}   (Ctrl-C ends it)", flush=True
        )
        if args.open:
            import webbrowser

            if not webbrowser.open(server.address):
                print("no browser could be opened", file=sys.stderr)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
        finally:
            if predictor is not None:
                predictor.stop()
    return 0
