"""Pipeline parallelism: schedules as data, and two executors that run them."""
