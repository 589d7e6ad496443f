"""A model behind OpenAI's interface: `minimegatron serve`; and a load on it: `minimegatron bench-serve`.

| file            | one idea                                                                               |
|-----------------|----------------------------------------------------------------------------------------|
| `router`        | one address before N servers: who answers what, and what happens when one dies         |
| `load`          | a load on a server, and what its users would have felt                                 |
| `workload`      | prompts, and when they arrive                                                          |
| `http_client`   | requests whose streams come with the moment of every piece                             |

FastAPI, uvicorn, prometheus-client and h11 are the extra `serve`.
"""
