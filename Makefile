# Two commands do everything, including set-up:  make train   make test
#
#   make train CONFIG=config/llama_laptop.py ARGS="--max_iters=100"     another config and settings (data: pystdlib)
#   make train OUT=out/again                                            another output folder
#   make test ARGS="-k scan -x"                                         a part of the tests
#   make test-fused                                                     kernels in Triton, on this CPU
#   make chaos                                                          long fault injection; as root, also network cuts
#   make slurm                                                          sweeps and tokens on a real Slurm (root) and Ray
#   make eval                                                           install the lm-evaluation-harness, score a model
#   make bench                                                          check and time the scan on this CPU
#   make gpu                                                            on a GPU: correctness, speed, training
#   make gpu STAGES=speed                                               one of these stages; each takes up to 9 minutes
#   make gpu PYTHON=python3                                             with your own interpreter; installs nothing
#   make PYTHON=python3.12 ...                                          create .venv with this interpreter

PYTHON ?= python3
CONFIG ?= config/longhorn_bpe.py
VENV   := .venv
PY     := $(VENV)/bin/python
OUT    ?= out/$(basename $(notdir $(CONFIG)))

.PHONY: train test test-fused eval chaos slurm lint bench gpu clean

train: $(VENV)/main
	$(PY) data/pystdlib/prepare.py
	$(if $(findstring bpe,$(CONFIG)),$(PY) data/pystdlib_bpe/prepare.py)
	$(PY) train.py $(CONFIG) --out_dir='$(OUT)' $(ARGS)
	$(PY) sample.py --out_dir='$(OUT)' --max_new_tokens=400

# Whatever the environment says, Python keeps bytecode and buffers output, as by default. One thread per process: with
# more threads than cores the kernels' parallel loops wait for each other.
test test-fused chaos slurm: export PYTHONDONTWRITEBYTECODE =
test test-fused chaos slurm: export PYTHONUNBUFFERED =
test test-fused chaos slurm: export OMP_NUM_THREADS = 1

test: $(VENV)/main $(VENV)/test lint
	$(PY) -m pytest -q -rs -n 2 --dist=worksteal tests $(ARGS)

# Runs other libraries' kernels and our Triton prototype in Triton's interpreter, in three minutes of CPU. On a GPU the
# tests above run the real kernels.
test-fused: $(VENV)/main $(VENV)/test $(VENV)/fused
	TRITON_INTERPRET=1 $(PY) -m pytest -q -n 2 --dist=worksteal tests/test_fused.py tests/test_scan_mma.py $(ARGS)

# Installs the lm-evaluation-harness for evaluate.py; scores the model of `make train`, if there is one.
eval: $(VENV)/main $(VENV)/eval
	$(PY) data/pystdlib/prepare.py
	@if [ -e '$(OUT)/checkpoint.safetensors' ]; then $(PY) evaluate.py '$(OUT)' $(ARGS); \
	else echo "installed; after make train: $(PY) evaluate.py '$(OUT)'"; fi

# Runs the long form of the fault tests, in one process.
chaos: $(VENV)/main $(VENV)/test
	LONGHORN_CHAOS=1 $(PY) -m pytest -v -rs tests/test_chaos.py tests/test_distributed.py tests/test_fuzz.py $(ARGS)

# Runs Slurm on this machine during the tests, see the script. LONGHORN_CHAOS=1 injects 20 faults and more.
slurm: $(VENV)/main $(VENV)/test $(VENV)/cluster
	tests/slurm_cluster.sh $(PY) -m pytest -v -rs tests/test_*cluster.py $(ARGS)

lint: $(VENV)/main $(VENV)/test
	$(VENV)/bin/ruff check .

bench: $(VENV)/main
	$(PY) bench/scan.py --device=cpu $(ARGS)

# With PYTHON=... on the command line: run that interpreter and install nothing. With OUT=...: write the records there
# instead of results/gpu_<device>/.
GIVEN_PYTHON = $(filter command,$(firstword $(origin PYTHON)))
gpu: $(if $(GIVEN_PYTHON),,$(VENV)/main $(VENV)/test)
	$(if $(GIVEN_PYTHON),$(PYTHON),$(PY)) bench/gpu.py $(if $(STAGES),--stages=$(STAGES)) $(if $(filter file,$(origin OUT)),,--out='$(OUT)') $(ARGS)

# Install once, and again when pyproject.toml changes: an empty file in .venv marks the time of the installation.
PIP = $(PY) -m pip install -q --disable-pip-version-check
$(VENV)/main: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	$(PIP) --group main
	@touch $@

$(VENV)/test $(VENV)/fused $(VENV)/eval $(VENV)/cluster: pyproject.toml $(VENV)/main
	$(PIP) --group $(@F)
	@touch $@

clean:
	rm -rf $(VENV) build out data/pystdlib*/*.bin data/pystdlib*/meta.json data/pystdlib_packages
