"""Turn text files into the indexed dataset that Megatron reads with `--data-path`.

python tools/prepare_text.py DIR_OR_FILES... --output-prefix P [--tokenizer DIR]
"""

import argparse
import sys
import sysconfig
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.errors import ConfigError


def standard_library() -> tuple[str, ...]:
    """Return the modules and packages of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "__pycache__"}
    return tuple(
        str(path)
        for path in sorted(root.iterdir())
        if path.name not in left_out and (path.suffix == ".py" or (path / "__init__.py").is_file())
    )


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths",
        nargs="*",
        help="text files, or directories of them (default: the source of Python's standard library)",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory of a Hugging Face tokenizer (default: bytes, vocabulary 256)",
    )
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        summary = write_dataset(
            TextSource(
                paths=tuple(options.paths) or standard_library(), tokenizer=options.tokenizer
            ),
            Path(options.output_prefix),
            progress=lambda files: track(files, "tokenizing", console=Console(stderr=True)),
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.output_prefix}.bin/.idx: {summary.num_tokens:,} tokens in "
        f"{summary.num_documents:,} documents, {summary.num_skipped_files:,} files skipped (not "
        f"text), {time.perf_counter() - start:.1f} s"
    )
    if options.tokenizer is None:
        flags = f"--tokenizer-type NullTokenizer --vocab-size {summary.vocabulary_size}"
    else:
        flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {options.tokenizer}"
    print(f"train on it with: --data-path {options.output_prefix} {flags}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
