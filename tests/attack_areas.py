"""Which test files are attacks, by area. `make attack` runs them and counts by these names."""

AREAS = {
    "sandbox/test_sandbox.py": "escapes from the sandbox",
    "sandbox/test_sandbox_escapes.py": "escapes from the sandbox",
    "sandbox/test_cheats.py": "cheats against the code verifier",
    "sandbox/test_lengths.py": "cheats against the code verifier",
    "verifiers/test_answer_cheats.py": "cheats against other verifiers",
    "verifiers/test_verifier_pool.py": "hostile reward functions",
    "sandbox/test_sandbox_server.py": "attacks on the sandbox server",
    "cli/test_serve_hostile.py": "attacks on the model server",
    "cli/test_serve_arguments.py": "attacks on the model server",
    "view/test_server.py": "attacks on the page",
    "view/test_hostile_folders.py": "attacks on the page",
    "cluster/test_wire.py": "messages between processes",
    "training/test_bad_inputs.py": "bad inputs, full disks",
    "training/test_memory.py": "out of memory",
    "training/test_resume.py": "kill -9 and resume",
    "methods/test_contract.py": "kill -9 and resume",
    "training/test_prefetch.py": "kill -9 and resume",
    "attack/test_hostile_models.py": "hostile model folders",
    "attack/test_random_settings.py": "random settings",
    "attack/test_attacks_notice.py": "missing protections",
}


def area_of(path: str) -> str:
    """Returns the area of a test file, given by the end of its path; empty if it has none."""
    for ending, area in AREAS.items():
        if path.replace("\\", "/").endswith(f"tests/{ending}"):
            return area
    return ""
