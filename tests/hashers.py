"""Argon2 as the product uses it, but at the lowest cost: tests log in hundreds of times, and each
login would otherwise cost two hashes of 0.2 s."""

from django.contrib.auth.hashers import Argon2PasswordHasher


class CheapArgon2(Argon2PasswordHasher):
    time_cost = 1
    memory_cost = 8  # KiB
    parallelism = 1
