"""A manager of continuous batching that serves long requests "0", "1" and so on under guard, until its input ends.

python -m tiny.served_script
"""

import sys
import threading

import canary_transformers

from tiny.batching import Traffic, served


def main() -> None:
    """Prints a line once requests run. Some run at any time."""
    model = served("llama", "cpu")
    canary_transformers.guard(model, control="write", log_level="error")
    traffic = Traffic(new_tokens=300, pages=200)
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    with model.continuous_batching_context_manager(**traffic.settings(model)) as manager:
        running = 0
        for number in range(10**6):
            manager.add_request(list(range(3 + number % 50, 63)), request_id=str(number), max_new_tokens=300)
            running += 1
            if number == 2:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
            while running >= 3 and not ends.is_set():
                answer = manager.get_result(timeout=0.1)
                running -= answer is not None and answer.is_finished()
            if ends.is_set():
                return


if __name__ == "__main__":
    main()
