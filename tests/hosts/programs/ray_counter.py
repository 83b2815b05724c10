"""The first script of every introduction to Ray: counters that are actors, found by a plain ``ray.init()``."""

import ray

ray.init()


@ray.remote
class Counter:
    def __init__(self):
        self.value = 0

    def increment(self):
        self.value += 1

    def get(self):
        return self.value


counters = [Counter.remote() for _ in range(4)]
for counter in counters:
    counter.increment.remote()
print(ray.get([counter.get.remote() for counter in counters]))
