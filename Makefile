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

.PHONY: demo test lint docs build bench abi gpu asan clean

demo: $(VENV)/package.stamp ## train a small network on photographs, on stock ops and on pixfuse
	$(BIN)/pixfuse demo

test: $(VENV)/test.stamp ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(VENV)/test.stamp $(VENV)/lint.stamp ## ruff, clang-format, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run --Werror $(CPP_FILES))
	$(BIN)/mypy

docs: $(VENV)/test.stamp ## the site, in build/site/index.html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

build: $(VENV)/torch.stamp ## the wheel, in dist/
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist $(INSTALL) .
	@ls dist/*.whl

bench: $(VENV)/test.stamp ## against PyTorch's own ops: make bench OP=group_norm
	$(BIN)/pixfuse bench $(addprefix --op ,$(OP)) --html bench.html --json bench.json

abi: $(VENV)/test.stamp ## the wheel: its tag, its contents, the symbols that its library needs
	$(BIN)/python -m pytest -q tests/test_wheel.py

GPU_PYTEST := PYTHONPATH=src $(PYTHON) -m pytest -q -W ignore -p no:cacheprovider
COMPOSES := (battery and not values and not gradcheck) or test_compile or test_compose or test_a_package
gpu: ## on a machine with a GPU, in the Python that has its torch: all tests, the sanitizer, doctor, the table, the benches
	cmake -S . -B build/gpu -DPython_EXECUTABLE=$(shell command -v $(PYTHON)) >/dev/null && cmake --build build/gpu -j
	$(GPU_PYTEST) -n $(JOBS) tests/test_gpu.py
	PIXFUSE_TEST_DEVICE=cuda $(GPU_PYTEST) -n $(JOBS) -k "$(COMPOSES)" src/pixfuse tests
	$(GPU_PYTEST) tests/test_distributed.py tests/test_examples.py -k on_gpus
	compute-sanitizer --error-exitcode 9 env $(GPU_PYTEST) tests/test_gpu.py -k test_values_and_gradients
	PYTHONPATH=src $(PYTHON) -m pixfuse._cli.main doctor
	$(PYTHON) benchmarks/h200_table.py --compile
	PYTHONPATH=src $(PYTHON) -m pixfuse._cli.main bench --device cuda --no-compile --json bench-cuda.json

ASAN := $(abspath build/asan)
# pytest on PYTHONPATH's package, also where an editable install would come first
PYTEST_HERE := import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in repr(f)]; \
  import pytest; sys.exit(pytest.main(sys.argv[1:]))
asan: $(VENV)/test.stamp ## the CPU kernels under AddressSanitizer and UBSan: golden vectors, strides, odd shapes
	$(BIN)/cmake -S . -B $(ASAN) -G Ninja -DPIXFUSE_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	$(BIN)/ninja -C $(ASAN)
	rm -rf $(ASAN)/src && cp -r src $(ASAN)/src && mkdir -p $(ASAN)/tests && cp -r tests/golden $(ASAN)/tests/
	cp $(ASAN)/_kernels.so $(ASAN)/src/pixfuse/
	cd $(ASAN) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=src OMP_NUM_THREADS=2 \
	  $(abspath $(BIN)/python) -c "$(PYTEST_HERE)" -q -p no:cacheprovider src/pixfuse \
	  -k "(golden and not bfloat16) or strides or values or any_ or masks or empty"

clean: ## all that was made
	rm -rf $(VENV) build dist docs/_static/made src/pixfuse/_kernels.so

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	@touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp pyproject.toml CMakeLists.txt $(NATIVE)
ifeq ($(COMPILER),)
	@echo "No C++ compiler (c++, g++, clang++) found: installing without the CPU kernels."
	@echo "Everything works and every op takes its reference, slow and right; make demo then takes about 1.7 times as long."
endif
	$(PIP) $(INSTALL) -e '.[cli]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/package.stamp
	$(PIP) 'pixfuse[test]' triton==$(TRITON) 'numpy<2.4'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/package.stamp
	$(PIP) 'pixfuse[lint]'
	@touch $@
