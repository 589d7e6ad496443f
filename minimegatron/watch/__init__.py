"""A page that shows a run while it trains: `minimegatron watch RUN`.

The training writes one JSON object a line (`--log-file`), and nothing else: an open page costs it nothing, and a run
that ended, or was copied from another machine, is watched in the same way.

    run.jsonl -> `log.RunLog`: numbers by name -> buckets -> `server`: JSON, what is new -> `page.js`
                     its configuration -> `predicted`, a process of its own: memory and time, from the planner

| module                    | contents                                                                               |
|---------------------------|----------------------------------------------------------------------------------------|
| `columns`                 | numbers at iterations, thinned to buckets for a drawing and to a bound for memory      |
| `log`                     | reads a log as it grows: resumed runs, broken lines, a file that is replaced           |
| `predicted`               | the planner's figures for the configuration of a log                                   |
| `server`                  | HTTP on 127.0.0.1, which reads and never writes                                        |
| `page`, `curves`, `panels` | the page; it asks no other machine for anything                                       |
"""
