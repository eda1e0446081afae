//! Sizes as people write them, and the list of those that are measured.

/// Bytes, with an optional binary K, M or G.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(['K', 'k', 'M', 'm', 'G', 'g', 'B', 'b']);
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1u64,
        "K" | "KB" => 1 << 10,
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        other => return Err(format!("{other} is no unit; K, M and G are")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text} is no size; 8, 64K, 32M and 1G are"))?;
    number
        .checked_mul(unit)
        .ok_or_else(|| format!("{text} is more than any memory has"))
}

/// The sizes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(Vec<u64>);

/// What counts as one element: a float.
pub const ELEMENT: u64 = 4;

impl Sizes {
    /// From `min` to `max`, by a factor or by a number of bytes.
    pub fn new(min: u64, max: u64, factor: u64, bytes: Option<u64>) -> Result<Sizes, String> {
        if min > max {
            return Err(format!("--minbytes {min} is more than --maxbytes {max}"));
        }
        if max < ELEMENT {
            return Err(format!(
                "--maxbytes {max} is less than one element of {ELEMENT} bytes"
            ));
        }
        if max > 1 << 40 {
            return Err(format!("--maxbytes {max} is more than 1 TiB"));
        }
        if bytes == Some(0) {
            return Err("--stepbytes 0 never ends".into());
        }
        if bytes.is_none() && factor < 2 && min < max {
            return Err(format!("--stepfactor {factor} never ends; 2 doubles"));
        }
        let mut list = Vec::new();
        let mut size = min.max(ELEMENT);
        while size <= max {
            list.push(size / ELEMENT * ELEMENT);
            if list.len() > 100_000 {
                return Err("more than 100,000 sizes; use a larger step".into());
            }
            size = match bytes {
                Some(b) => size.saturating_add(b),
                None if factor < 2 => break,
                None => size.saturating_mul(factor),
            };
        }
        list.dedup();
        Ok(Sizes(list))
    }

    /// The sizes, each a multiple of an element.
    pub fn list(&self) -> &[u64] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse_bytes("8"), Ok(8));
        assert_eq!(parse_bytes("64K"), Ok(64 << 10));
        assert_eq!(parse_bytes("1m"), Ok(1 << 20));
        assert_eq!(parse_bytes("2GB"), Ok(2 << 30));
        for bad in ["", "K", "8X", "-1", "1.5M", "99999999999G", "8KM"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn steps() {
        let list = |a, b, f, s| Sizes::new(a, b, f, s).map(|s| s.0);
        assert_eq!(list(8, 64, 2, None), Ok(vec![8, 16, 32, 64]));
        assert_eq!(list(8, 60, 2, None), Ok(vec![8, 16, 32]));
        assert_eq!(list(4, 12, 2, Some(4)), Ok(vec![4, 8, 12]));
        assert_eq!(list(100, 100, 1, None), Ok(vec![100]));
        assert_eq!(list(1, 9, 3, None), Ok(vec![4]));
        assert!(list(64, 8, 2, None).is_err());
        assert!(list(8, 64, 1, None).is_err());
        assert!(list(8, 64, 2, Some(0)).is_err());
        assert!(list(0, 0, 2, None).is_err());
    }
}
