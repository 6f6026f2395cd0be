"""Entry point of the `tinygpt` command.

Importing `keras_tinygpt` imports TensorFlow, which prints a page of notices. This file
is also installed beside the package, as `tinygpt_launcher`, so that it can keep them
off the terminal before that import. A log level set by the user is kept.
"""

import os
import sys


def main() -> None:
    """Runs `keras_tinygpt.cli.main` without TensorFlow's notices."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        from keras_tinygpt.cli import main as run
    else:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        standard_error = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # the notices are written to the descriptor itself
        try:
            from keras_tinygpt.cli import main as run
        except KeyboardInterrupt:
            sys.exit(130)
        except (ImportError, ValueError) as error:
            os.dup2(standard_error, 2)
            backend = os.environ.get("KERAS_BACKEND", "tensorflow")
            reason = str(error).splitlines()[0]
            print(
                f"tinygpt: error: KERAS_BACKEND={backend} cannot be used: {reason}",
                file=sys.stderr,
            )
            sys.exit(2)
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            os.close(null)
    run()


if __name__ == "__main__":
    main()
