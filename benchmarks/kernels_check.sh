#!/bin/sh
# Checks and benchmarks of the sampling kernels on one GPU; about 12 minutes on an H200, mostly to compile the variants
# of the kernels that the tests use.
#
#   benchmarks/kernels_check.sh RESULTS.json [additional arguments of `draftwire bench kernels`, such as --peer DIR]
#
# Stops with a nonzero status at the first failure. PYTHON is the interpreter; compute-sanitizer must be on the PATH.
set -eu

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
RESULTS=$1
shift
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/tests/kernels${PYTHONPATH:+:$PYTHONPATH}"

# The first run compiles; the sanitizer then finds the kernels in Triton's cache.
"$PYTHON" tests/kernels/small_launches.py
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$PYTHON" tests/kernels/small_launches.py
done
"$PYTHON" -m pytest -q -x -p no:cacheprovider --ignore=tests/kernels/test_kernels_compile.py tests/kernels -k 'not attention'
"$PYTHON" -m draftwire_cli bench kernels --json "$RESULTS" "$@"
