# Every target makes the environment that it needs in $(VENV) and is what CI runs.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TRITON ?= 3.6.0
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
NATIVE := $(wildcard src/pixfuse/*/*.cpp src/pixfuse/*/*.h)
CPP_FILES := $(shell git ls-files '*.cpp' '*.h' 2>/dev/null)
COMPILER := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)
ifeq ($(COMPILER),)
INSTALL := --config-settings=wheel.cmake=false
endif

.PHONY: demo test lint build bench abi clean

demo: $(VENV)/package.stamp ## train a small network on photographs, on stock ops and on pixfuse
	$(BIN)/pixfuse demo

test: $(VENV)/test.stamp ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

lint: $(VENV)/test.stamp $(VENV)/lint.stamp ## ruff, clang-format, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run --Werror $(CPP_FILES))
	$(BIN)/mypy

build: $(VENV)/torch.stamp ## the wheel, in dist/
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist $(INSTALL) .
	@ls dist/*.whl

bench: $(VENV)/test.stamp ## against PyTorch's own ops: make bench OP=group_norm
	$(BIN)/pixfuse bench $(addprefix --op ,$(OP)) --html bench.html --json bench.json

abi: $(VENV)/test.stamp ## the wheel: its tag, its contents, the symbols that its library needs
	$(BIN)/python -m pytest -q tests/test_wheel.py

clean: ## all that was made
	rm -rf $(VENV) build dist src/pixfuse/_kernels.so

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	@touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp pyproject.toml CMakeLists.txt $(NATIVE)
ifeq ($(COMPILER),)
	@echo "No C++ compiler (c++, g++, clang++) found: installing without the CPU kernels."
	@echo "Everything works and every op takes its reference, slow and right; make demo then takes about NOCC."
endif
	$(PIP) $(INSTALL) -e '.[cli]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/package.stamp
	$(PIP) 'pixfuse[test]' triton==$(TRITON) 'numpy<2.4'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/package.stamp
	$(PIP) 'pixfuse[lint]'
	@touch $@
