"""A page that shows a run while it trains: `minimegatron watch RUN`.

The training writes one JSON object a line (`--log-file`), and nothing else: an open page costs it nothing, and a run
that ended, or was copied from another machine, is watched in the same way.

    run.jsonl --tail--> `log.RunLog`: numbers by name --buckets--> `server` --JSON, what is new--> `page.js`
                        configuration --another process--> `predicted`: memory and time, from the planner

| module      | contents                                                                                    |
|-------------|---------------------------------------------------------------------------------------------|
| `columns`   | numbers at iterations, thinned to buckets for a drawing and to a bound for memory             |
| `log`       | reads a log as it grows: steps that repeat after a resume, broken lines, a file that is replaced |
| `predicted` | the planner's figures for the configuration of a log                                        |
| `server`    | HTTP on 127.0.0.1, which reads and never writes                                              |
| `*.html`, `*.css`, `*.js` | the page; it asks no other machine for anything                                  |
"""
