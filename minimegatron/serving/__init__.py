"""OpenAI's HTTP interface to an engine (`minimegatron serve`), and a load generator (`minimegatron bench-serve`).

| file            | one idea                                                                               |
|-----------------|----------------------------------------------------------------------------------------|
| `protocol`      | the fields of a request, each honoured or refused by its name                          |
| `engine_thread` | one engine for many connections: admission, deadlines, aborts, errors                  |
| `answers`       | pieces of text to completions, whole or as server-sent events                          |
| `metrics`       | Prometheus metrics under vLLM's names                                                  |
| `service`       | an HTTP request to the engine's requests, their tokens to an answer                    |
| `http_messages` | bodies, responses, events, and errors with their statuses                              |
| `app`           | routes, API key, shutdown                                                              |
| `http_server`   | connections: a deadline for the headers of a request, the limit of open files          |
| `chat.html`     | a chat page                                                                            |
| `balance`       | which of N servers answers a request: by the beginning of its prompt, and by load      |
| `router`        | one address in front of N servers: requests passed on, retries                         |
| `replicas`      | the processes of these servers: started, restarted, ended                              |
| `load`          | the load generator, and latencies as users see them                                    |
| `workload`      | prompts and arrival times                                                              |
| `http_client`   | an HTTP client that timestamps every piece of a stream                                 |

FastAPI, uvicorn, prometheus-client and h11 are the extra `serve`.
"""
