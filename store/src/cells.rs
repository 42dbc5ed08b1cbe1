//! Columns as JSON values, row by row and without a text in between: the same values that arrow's JSON codec writes,
//! but for the last digit of floats, which reading a text may change.

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait, PrimitiveArray, RecordBatch};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Fields, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use serde_json::{Map, Value};

/// The value of a row that is not null.
type Cell<'a> = Box<dyn Fn(usize) -> Value + 'a>;

/// Returns the rows of a batch as objects, in which nulls are absent; `None` if a column is of a type that only arrow's
/// codec knows: decimals, binaries, dictionaries and maps.
pub(crate) fn objects(batch: &RecordBatch) -> Option<Vec<Map<String, Value>>> {
    let object = object(batch.schema_ref().fields(), batch.columns())?;
    Some((0..batch.num_rows()).map(object).collect())
}

/// Whether [`value`] knows the column's type.
pub(crate) fn has_values(array: &dyn Array) -> bool {
    cell(array).is_some()
}

/// The value of one row; null if it has none.
pub(crate) fn value(array: &dyn Array, row: usize) -> Value {
    let of_cell = || cell(array).map_or(Value::Null, |cell| cell(row));
    match array.data_type() {
        _ if array.is_null(row) => Value::Null,
        // The commonest without a box, which takes as long as the value.
        DataType::Utf8 => array.as_string_opt::<i32>().map_or(Value::Null, |texts| texts.value(row).into()),
        DataType::Int64 => array.as_primitive_opt::<Int64Type>().map_or(Value::Null, |ints| ints.value(row).into()),
        _ => of_cell(),
    }
}

fn object<'a>(fields: &'a Fields, columns: &'a [ArrayRef]) -> Option<impl Fn(usize) -> Map<String, Value> + use<'a>> {
    let cells = columns.iter().map(|column| cell(column)).collect::<Option<Vec<_>>>()?;
    Some(move |row| {
        let cells = fields.iter().zip(columns.iter().zip(&cells));
        let present = cells.filter(|(_, (column, _))| !column.is_null(row));
        present.map(|(field, (_, cell))| (field.name().clone(), cell(row))).collect()
    })
}

fn cell(array: &dyn Array) -> Option<Cell<'_>> {
    Some(match array.data_type() {
        DataType::Utf8 => {
            let texts = array.as_string_opt::<i32>()?;
            Box::new(|row| Value::from(texts.value(row)))
        }
        DataType::LargeUtf8 => {
            let texts = array.as_string_opt::<i64>()?;
            Box::new(|row| Value::from(texts.value(row)))
        }
        DataType::Utf8View => {
            let texts = array.as_string_view_opt()?;
            Box::new(|row| Value::from(texts.value(row)))
        }
        DataType::Boolean => {
            let flags = array.as_boolean_opt()?;
            Box::new(|row| Value::from(flags.value(row)))
        }
        DataType::List(_) => list::<i32>(array)?,
        DataType::LargeList(_) => list::<i64>(array)?,
        DataType::Struct(fields) => {
            let object = object(fields, array.as_struct_opt()?.columns())?;
            Box::new(move |row| Value::Object(object(row)))
        }
        temporal if temporal.is_temporal() => {
            let options = FormatOptions::new().with_display_error(true);
            let formatter = ArrayFormatter::try_new(array, &options).ok()?;
            Box::new(move |row| Value::from(formatter.value(row).to_string()))
        }
        _ => return number(array),
    })
}

fn list<O: OffsetSizeTrait>(array: &dyn Array) -> Option<Cell<'_>> {
    let list = array.as_list_opt::<O>()?;
    let (offsets, items) = (list.value_offsets(), list.values());
    let item = cell(items)?;
    Some(Box::new(move |row| {
        let elements = offsets[row].as_usize()..offsets[row + 1].as_usize();
        elements.map(|at| if items.is_null(at) { Value::Null } else { item(at) }).collect()
    }))
}

fn number(array: &dyn Array) -> Option<Cell<'_>> {
    fn exact<T: ArrowPrimitiveType<Native: Into<Value>>>(array: &PrimitiveArray<T>) -> Cell<'_> {
        Box::new(|row| array.value(row).into())
    }
    Some(match array.data_type() {
        DataType::Int8 => exact::<Int8Type>(array.as_primitive_opt()?),
        DataType::Int16 => exact::<Int16Type>(array.as_primitive_opt()?),
        DataType::Int32 => exact::<Int32Type>(array.as_primitive_opt()?),
        DataType::Int64 => exact::<Int64Type>(array.as_primitive_opt()?),
        DataType::UInt8 => exact::<UInt8Type>(array.as_primitive_opt()?),
        DataType::UInt16 => exact::<UInt16Type>(array.as_primitive_opt()?),
        DataType::UInt32 => exact::<UInt32Type>(array.as_primitive_opt()?),
        DataType::UInt64 => exact::<UInt64Type>(array.as_primitive_opt()?),
        DataType::Float64 => exact::<Float64Type>(array.as_primitive_opt()?),
        DataType::Float32 => {
            let floats = array.as_primitive_opt::<Float32Type>()?;
            // As a text has it: 0.1 is 0.1, not 0.10000000149.
            Box::new(|row| Value::from(floats.value(row).to_string().parse::<f64>().unwrap_or(f64::NAN)))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        BooleanArray, Date32Array, Decimal128Array, Float32Array, Float64Array, Int64Array, LargeStringArray,
        ListArray, StringArray, StringViewArray, StructArray, TimestampMicrosecondArray, UInt8Array, UInt64Array,
    };
    use arrow::buffer::{NullBuffer, OffsetBuffer};
    use arrow::datatypes::{Field, Schema};

    use super::*;

    /// What arrow's codec makes of the batch.
    fn by_codec(batch: &RecordBatch) -> Vec<Map<String, Value>> {
        let mut writer = arrow::json::LineDelimitedWriter::new(Vec::new());
        writer.write(batch).unwrap();
        writer.finish().unwrap();
        let lines = writer.into_inner();
        let rows = serde_json::Deserializer::from_slice(&lines).into_iter();
        rows.collect::<Result<_, _>>().unwrap()
    }

    fn batch(columns: Vec<ArrayRef>) -> RecordBatch {
        let fields = columns.iter().enumerate().map(|(i, c)| Field::new(format!("c{i}"), c.data_type().clone(), true));
        RecordBatch::try_new(Arc::new(Schema::new(fields.collect::<Vec<_>>())), columns).unwrap()
    }

    fn plain() -> Vec<ArrayRef> {
        vec![
            Arc::new(StringArray::from(vec![Some("Amélie \"2\"\n"), None, Some(""), Some("\u{1}\u{2028}")])),
            Arc::new(LargeStringArray::from(vec![None, Some("b"), Some("c"), Some("d")])),
            Arc::new(StringViewArray::from(vec![Some("short"), Some("longer than a view holds"), None, None])),
            Arc::new(BooleanArray::from(vec![Some(true), None, Some(false), Some(true)])),
            Arc::new(Int64Array::from(vec![Some(i64::MIN), Some(-1), Some(i64::MAX), None])),
            Arc::new(UInt64Array::from(vec![Some(u64::MAX), Some(0), None, Some(7)])),
            Arc::new(UInt8Array::from(vec![1, 2, 3, 4])),
            Arc::new(Float32Array::from(vec![Some(0.1), Some(f32::NAN), None, Some(2.5e7)])),
            Arc::new(Float64Array::from(vec![Some(4.0), Some(f64::INFINITY), Some(-0.0), Some(1e-7)])),
            Arc::new(TimestampMicrosecondArray::from(vec![Some(0), Some(1_700_000_000_123_456), None, Some(-1)])),
            Arc::new(TimestampMicrosecondArray::from(vec![1, 1_000_000, 0, 5]).with_timezone("UTC")),
            Arc::new(Date32Array::from(vec![Some(0), None, Some(20_000), Some(-5)])),
        ]
    }

    #[test]
    fn cells_are_what_the_codec_writes() {
        let inner = batch(plain());
        let nulls = NullBuffer::from(vec![true, false, true, true]);
        let structs = StructArray::new(inner.schema().fields().clone(), inner.columns().to_vec(), Some(nulls));
        let structs: ArrayRef = Arc::new(structs);
        let items = Arc::new(Field::new("item", structs.data_type().clone(), true));
        let offsets = OffsetBuffer::from_lengths([2, 0, 1, 1]);
        let nulls = NullBuffer::from(vec![true, true, false, true]);
        let list: ArrayRef = Arc::new(ListArray::new(items, offsets, structs.clone(), Some(nulls)));
        let whole = batch([plain(), vec![structs, list]].concat());
        for batch in [whole.clone(), whole.slice(1, 2), whole.slice(3, 1), whole.slice(2, 0)] {
            let (found, expected) = (objects(&batch).unwrap(), by_codec(&batch));
            assert_eq!(found, expected);
            let keys = |rows: &[Map<String, Value>]| rows.iter().flat_map(|r| r.keys().cloned()).collect::<Vec<_>>();
            assert_eq!(keys(&found), keys(&expected), "the order of fields");
        }
    }

    #[test]
    fn floats_keep_their_bits_and_single_ones_their_decimals() {
        let bits = (0..20_000u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let doubles: Vec<f64> = bits.clone().map(f64::from_bits).chain((1..5000).map(|n| f64::from(n) / 7.0)).collect();
        let singles: Vec<f32> = bits.map(|bits| f32::from_bits((bits >> 32) as u32)).collect();
        let found = |array: ArrayRef| -> Vec<Option<f64>> {
            objects(&batch(vec![array])).unwrap().iter().map(|row| row["c0"].as_f64()).collect()
        };
        for (value, found) in doubles.iter().zip(found(Arc::new(Float64Array::from(doubles.clone())))) {
            assert_eq!(found.map(f64::to_bits), value.is_finite().then(|| value.to_bits()));
        }
        for (value, found) in singles.iter().zip(found(Arc::new(Float32Array::from(singles.clone())))) {
            assert_eq!(found.is_some(), value.is_finite(), "{value}");
            assert!(found.is_none_or(|found| found == format!("{value:?}").parse::<f64>().unwrap()), "{value}");
        }
    }

    #[test]
    fn other_types_are_left_to_the_codec() {
        assert!(objects(&batch(vec![Arc::new(Decimal128Array::from(vec![1]))])).is_none());
    }
}
