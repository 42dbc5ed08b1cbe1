//! x Wᵀ by cublasLt, whose choice of an algorithm is kept.
//!
//! cuBLAS chooses one in every call. The choice here is that of cublasLt's heuristics, a function of shapes and types
//! alone: it does not vary from run to run as measured times would.
#![expect(unsafe_code, reason = "cudarc has no safe interface to cublasLt that keeps algorithms")]

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr,
    sync::Arc,
};

use candle_core::{
    DType, Error, Result, Tensor, bail,
    cuda::cudarc::{
        cublas::sys::cublasOperation_t,
        cublaslt::{
            result,
            sys::{
                self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
                cublasLtMatmulDescAttributes_t, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                cublasLtMatrixLayout_t, cudaDataType_t,
            },
        },
        driver::{CudaSlice, CudaStream, DevicePtr as _, sys::CUdevice_attribute},
    },
};

use super::memory;

/// What cublasLt may write beside the result, in bytes: NVIDIA's recommendation from compute capability 9.0 on, and
/// before.
const SCRATCH: [usize; 2] = [32 << 20, 4 << 20];

/// Bytes that cublasLt wants addresses to be multiples of, unless it is told otherwise.
const ALIGNMENT: u64 = 256;

/// Rows of a product are made multiples of the first number, from the second one on of that: what lies behind is
/// multiplied as well and nobody reads it. A product of so few rows takes no longer, and all shapes are known soon:
/// draft trees have any number of nodes, and to look an algorithm up took 2 ms.
pub(super) const PADDED: [usize; 2] = [8, 64];

/// Rows of a product for so many that are wanted.
pub(super) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(if rows <= PADDED[1] { PADDED[0] } else { PADDED[1] })
}

/// Products of one device.
#[derive(Debug)]
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    stream: Arc<CudaStream>,
    scratch: CudaSlice<u8>,
    /// Sums in f32, of which the left matrix, column-major, is transposed.
    description: cublasLtMatmulDesc_t,
    preference: cublasLtMatmulPreference_t,
    plans: HashMap<Shape, Plan>,
}

// SAFETY: a handle and descriptions belong to no thread; only one at a time has them here.
unsafe impl Send for Products {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    /// Of x and W, and of y.
    dtypes: [DType; 2],
    rows: usize,
    inputs: usize,
    outputs: usize,
}

/// How a product of a shape is computed. Row-major matrices are column-major ones transposed, so what is computed is
/// yᵀ = W xᵀ.
#[derive(Debug)]
struct Plan {
    weight: Layout,
    x: Layout,
    y: Layout,
    algorithm: cublasLtMatmulAlgo_t,
}

#[derive(Debug)]
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    /// A column-major matrix without gaps.
    fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        let layout = result::create_matrix_layout(data_type(dtype)?, rows as u64, columns as u64, rows as i64);
        layout.map(Self).map_err(Error::wrap)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it was created and is dropped once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Products {
    pub(super) fn new(stream: Arc<CudaStream>) -> Result<Self> {
        let major = stream.context().attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let bytes = SCRATCH[usize::from(major.map_err(Error::wrap)? < 9)];
        // SAFETY: nobody reads it but cublasLt, which writes it before.
        let scratch = unsafe { stream.alloc::<u8>(bytes) }.map_err(Error::wrap)?;
        // Whatever exists is destroyed if a later part fails.
        let mut products = Self {
            handle: ptr::null_mut(),
            stream,
            scratch,
            description: ptr::null_mut(),
            preference: ptr::null_mut(),
            plans: HashMap::new(),
        };
        products.describe(bytes).map_err(Error::wrap)?;
        Ok(products)
    }

    fn describe(&mut self, bytes: usize) -> std::result::Result<(), result::CublasError> {
        let transposed = cublasOperation_t::CUBLAS_OP_T;
        self.handle = result::create_handle()?;
        self.description = result::create_matmul_desc(CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F)?;
        self.preference = result::create_matmul_pref()?;
        // SAFETY: both exist, and the attributes are of these types.
        unsafe {
            result::set_matmul_desc_attribute(
                self.description,
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            result::set_matmul_pref_attribute(
                self.preference,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )
        }
    }

    /// y = x Wᵀ for x `[rows, inputs]` and W `[outputs, inputs]` of one dtype and y `[rows, outputs]` of that or f32,
    /// all contiguous. Rows are [`padded`] where x and y have memory behind them.
    pub(super) fn multiply(&mut self, x: &Tensor, weight: &Tensor, y: &Tensor) -> Result<()> {
        let ((rows, inputs), (outputs, _)) = (x.dims2()?, weight.dims2()?);
        let fit = weight.dims() == [outputs, inputs] && y.dims() == [rows, outputs] && weight.dtype() == x.dtype();
        if !fit || [x, weight, y].iter().any(|tensor| !tensor.is_contiguous()) {
            bail!("a product of {:?} and {:?} to {:?}", x.layout(), weight.layout(), y.layout());
        }
        let (dtypes, stream) = ([x.dtype(), y.dtype()], self.stream.clone());
        let [(x, of_x), (weight, _), (y, of_y)] = [memory(x, &stream)?, memory(weight, &stream)?, memory(y, &stream)?];
        let has_room = of_x >= padded(rows) * inputs && of_y >= padded(rows) * outputs;
        let shape = Shape { dtypes, rows: if has_room { padded(rows) } else { rows }, inputs, outputs };
        if [x, weight, y].iter().any(|address| address % ALIGNMENT != 0) {
            bail!("a product of matrices that do not begin at multiples of {ALIGNMENT} bytes");
        }
        let (scratch, bytes) = (self.scratch.device_ptr(&stream).0, self.scratch.num_bytes());
        let (handle, description) = (self.handle, self.description);
        let plan = self.plan(shape)?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        // SAFETY: the matrices have the shapes of the layouts, and the stream gives their memory back behind this.
        unsafe {
            result::matmul(
                handle,
                description,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight as *const c_void,
                plan.weight.0,
                x as *const c_void,
                plan.x.0,
                y as *const c_void,
                plan.y.0,
                y as *mut c_void,
                plan.y.0,
                &raw const plan.algorithm,
                scratch as *mut c_void,
                bytes,
                stream.cu_stream().cast(),
            )
        }
        .map_err(Error::wrap)
    }

    fn plan(&mut self, shape: Shape) -> Result<&Plan> {
        let entry = match self.plans.entry(shape) {
            Entry::Occupied(known) => return Ok(known.into_mut()),
            Entry::Vacant(entry) => entry,
        };
        let Shape { dtypes: [dtype, to], rows, inputs, outputs } = shape;
        let weight = Layout::new(dtype, inputs, outputs)?;
        let (x, y) = (Layout::new(dtype, inputs, rows)?, Layout::new(to, outputs, rows)?);
        // SAFETY: all of them exist.
        let found = unsafe {
            result::get_matmul_algo_heuristic(self.handle, self.description, weight.0, x.0, y.0, y.0, self.preference)
        };
        let algorithm = found.map_err(Error::wrap)?.algo;
        Ok(entry.insert(Plan { weight, x, y, algorithm }))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: what exists is destroyed once.
        unsafe {
            if !self.preference.is_null() {
                let _ = result::destroy_matmul_pref(self.preference);
            }
            if !self.description.is_null() {
                let _ = result::destroy_matmul_desc(self.description);
            }
            if !self.handle.is_null() {
                let _ = result::destroy_handle(self.handle);
            }
        }
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType_t::CUDA_R_16BF),
        other => bail!("no product of {other:?}"),
    }
}
