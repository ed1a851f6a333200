//! One spelling for equal things, and a fingerprint of it.
//!
//! Two JSON texts that mean the same may differ in key order, blanks and number spelling. The
//! canonical form sorts keys, drops blanks and writes numbers one way, so that its SHA-256 is a
//! name: of an arm, a workload, a space, a machine.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// A SHA-256 in lower-case hexadecimal; `sha256sum` of the canonical text prints the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// The fingerprint of a value's canonical form.
    ///
    /// Values of this program's own types always serialize; one that does not (a map with keys that
    /// are no strings) is a defect and fingerprints as `null` would, which its tests would show.
    pub fn of(value: &impl Serialize) -> Self {
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        Self::of_bytes(canonical(&value).as_bytes())
    }

    /// The SHA-256 of bytes as they are.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(hexadecimal(&Sha256::digest(bytes)))
    }

    /// The SHA-256 of everything a reader yields.
    pub fn of_reader(mut reader: impl std::io::Read) -> std::io::Result<Self> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0_u8; 1 << 20];
        loop {
            match reader.read(&mut buffer)? {
                0 => return Ok(Self(hexadecimal(&hash.finalize()))),
                length => hash.update(&buffer[..length]),
            }
        }
    }

    /// All 64 digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first twelve digits: enough to tell the arms of a run apart.
    pub fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The canonical text of a JSON value: keys sorted by their bytes, no blanks, strings escaped as
/// serde_json does, numbers as serde_json's shortest round-trip form, integral floats as integers.
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write_canonical(value, &mut text);
    text
}

fn write_canonical(value: &Value, text: &mut String) {
    match value {
        Value::Null => text.push_str("null"),
        Value::Bool(flag) => text.push_str(if *flag { "true" } else { "false" }),
        Value::Number(number) => write_number(number, text),
        Value::String(string) => write_string(string, text),
        Value::Array(items) => {
            text.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    text.push(',');
                }
                write_canonical(item, text);
            }
            text.push(']');
        }
        Value::Object(entries) => {
            let mut keys: Vec<&String> = entries.keys().collect();
            keys.sort_unstable();
            text.push('{');
            for (position, key) in keys.into_iter().enumerate() {
                if position > 0 {
                    text.push(',');
                }
                write_string(key, text);
                text.push(':');
                write_canonical(&entries[key], text);
            }
            text.push('}');
        }
    }
}

fn write_number(number: &serde_json::Number, text: &mut String) {
    // 2.0 and 2 are equal things; floats of at most 2^53 that are whole are written as integers.
    match number.as_f64() {
        Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0 => {
            text.push_str(&(float as i64).to_string());
        }
        _ => text.push_str(&number.to_string()),
    }
}

fn write_string(string: &str, text: &mut String) {
    text.push_str(&Value::String(string.to_owned()).to_string());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_form_is_sorted_and_tight() {
        let value = json!({"b": [1, 2.0, 0.5, null], "a": {"z": "q\"\n", "y": true}});
        assert_eq!(canonical(&value), r#"{"a":{"y":true,"z":"q\"\n"},"b":[1,2,0.5,null]}"#);
    }

    #[test]
    fn the_fingerprint_is_plain_sha256() {
        assert_eq!(
            Fingerprint::of_bytes(b"abc").as_str(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(Fingerprint::of_reader(&b"abc"[..]).unwrap(), Fingerprint::of_bytes(b"abc"));
    }

    proptest! {
        #[test]
        fn key_order_never_matters(entries in proptest::collection::btree_map("[a-z]{1,6}", any::<i32>(), 0..8)) {
            let forward: serde_json::Map<String, Value> =
                entries.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
            let backward: serde_json::Map<String, Value> =
                entries.iter().rev().map(|(key, value)| (key.clone(), json!(value))).collect();
            prop_assert_eq!(Fingerprint::of(&forward), Fingerprint::of(&backward));
        }

        #[test]
        fn the_form_reads_back_as_the_same_value(text in ".{0,40}", number in any::<i64>()) {
            let value = json!({"t": text, "n": number});
            let back: Value = serde_json::from_str(&canonical(&value)).unwrap();
            prop_assert_eq!(back, value);
        }
    }
}
