# Every target makes the environment that it needs in $(VENV) and is what CI runs.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TRITON ?= 3.6.0
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
NATIVE := $(wildcard src/pixfuse/*/cpu.cpp src/pixfuse/_shared/*.h)
CPP_FILES := $(shell git ls-files '*.cpp' '*.h' 2>/dev/null)
COMPILER := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)
ifeq ($(COMPILER),)
INSTALL := --config-settings=wheel.cmake=false
endif

.PHONY: test lint build clean

test: $(VENV)/test.stamp ## the whole test suite
	$(BIN)/python -m pytest -q -n $(JOBS)

lint: $(VENV)/test.stamp $(VENV)/lint.stamp ## ruff, clang-format, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run --Werror $(CPP_FILES))
	$(BIN)/mypy

build: $(VENV)/torch.stamp ## the wheel, in dist/
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist $(INSTALL) .
	@ls dist/*.whl

clean: ## all that was made
	rm -rf $(VENV) build dist src/pixfuse/_kernels.so

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	@touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp pyproject.toml CMakeLists.txt $(NATIVE)
ifeq ($(COMPILER),)
	@echo "No C++ compiler (c++, g++, clang++) found: installing without the CPU kernels."
	@echo "Everything works and every op takes its reference, slow and right."
endif
	$(PIP) $(INSTALL) -e '.[cli]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/package.stamp
	$(PIP) $(INSTALL) -e '.[test]' triton==$(TRITON) 'numpy<2.4'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) $$($(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['lint'])")
	@touch $@
