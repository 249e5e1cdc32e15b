# make demo        build, install into .venv and let the demo model answer
# make check       everything CI runs
# make check-all   check, then aarch64, sanitizers and the long runs
# make check-aarch64  the native tests cross-built for aarch64, run by qemu
# make bench       speed and memory beside other engines, and every kernel (bench/README.md)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := build/native

.PHONY: demo install install-test lint generate format native check check-aarch64 check-all sanitize bench wheel device clean

demo: install
	$(BIN)/colibri run --chat 'Define "harbor".'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

install: $(BIN)/python
	$(BIN)/pip install --quiet .

install-test: $(BIN)/python
	$(BIN)/pip install --quiet '.[test,parity]' cmake ninja

generate:
	$(BIN)/python tools/generate.py

lint:
	$(BIN)/python tools/generate.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests bench -name '*.[ch]' ! -name '*_generated.h')
	$(BIN)/pyright

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests bench -name '*.[ch]' ! -name '*_generated.h')

native:
	$(BIN)/cmake -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCOLIBRI_TESTS=ON
	$(BIN)/cmake --build $(NATIVE)

check: install-test lint native
	$(BIN)/ctest --test-dir $(NATIVE) --output-on-failure
	$(BIN)/python -m pytest tests

AARCH64 := build/aarch64
AARCH64_PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static

check-aarch64: install-test
	@for tool in aarch64-linux-gnu-gcc qemu-aarch64-static; do \
	  command -v $$tool >/dev/null || { echo "$@ needs $$tool; on Debian: apt-get install $(AARCH64_PACKAGES)" >&2; exit 1; }; \
	done
	$(BIN)/cmake -S . -B $(AARCH64) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCOLIBRI_TESTS=ON \
	  --toolchain cmake/aarch64.cmake
	$(BIN)/cmake --build $(AARCH64)
	$(BIN)/ctest --test-dir $(AARCH64) --output-on-failure

sanitize: install-test
	for kind in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCOLIBRI_TESTS=ON -DCOLIBRI_SANITIZE=$$kind && \
	  $(BIN)/cmake --build build/$$kind && $(BIN)/ctest --test-dir build/$$kind --output-on-failure || exit 1; \
	done

check-all: check check-aarch64 sanitize
	COLIBRI_SLOW=1 COLIBRI_FUZZ=10000 $(BIN)/python -m pytest tests

# Peers: LLAMA_PYTHON, IK_PYTHON, TORCH_PYTHON, VLLM_PYTHON=interpreter (bench/README.md); BENCH='--shape b7 ...'
bench: $(BIN)/python
	$(BIN)/pip install --quiet '.[bench]'
	$(BIN)/python bench/run.py $(BENCH)

wheel: $(BIN)/python
	$(BIN)/pip wheel --quiet --no-deps -w dist .

# libcolibri.a and colibri.h under build/device
device:
	cmake -S . -B build/device-build && cmake --build build/device-build --target colibri_static
	cmake --install build/device-build --component device --prefix build/device

clean:
	rm -rf build dist
