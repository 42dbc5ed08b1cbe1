// layer.cu against f64, for random shapes.
//
// Usage: layer_test [CASES]; fails on a difference beyond the rounding of the result.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shim.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "random.h"

#include "../layer.cu"

// The largest error so far of a number, in halves of a unit of its last place.
struct Errors {
    double most = 0;

    // Where the result is a difference of larger numbers, f32 rounds these as well.
    template <typename T>
    void add(T found, double expected, double size = 1) {
        const double of = std::is_same_v<T, float> ? size : 1;
        const double error = std::abs(number(found) - expected) / HALF_UNIT<T> / std::max(of, std::abs(expected));
        most = error <= most ? most : error;  // NaN, too
    }
};

// Of a row, which mostly is one of whole loads.
static unsigned random_width() { return below(4) ? 8 * (1 + below(120)) : 1 + below(900); }

static double norm_scale(const std::vector<double>& x, float eps) {
    double squares = 0;
    for (double value : x) {
        squares += value * value;
    }
    return 1 / std::sqrt(squares / double(x.size()) + double(eps));
}

template <typename T, typename Kernel>
static double add_norm_error(Kernel kernel) {
    const unsigned nodes = 1 + below(5), width = random_width();
    const float eps = below(2) ? 1e-5f : 0.3f;
    const auto x = values<T>(nodes * width), y = values<T>(nodes * width), weight = values<T>(width);
    std::vector<T> sums = x, norms(nodes * width);
    const T* from = below(2) ? sums.data() : x.data();
    const T* added = below(4) ? y.data() : nullptr;
    launch({nodes, 1}, 256, [&] { kernel(from, added, weight.data(), sums.data(), norms.data(), width, eps); });
    Errors errors;
    for (unsigned node = 0; node < nodes; node++) {
        std::vector<double> row;
        for (unsigned at = node * width; at < (node + 1) * width; at++) {
            errors.add(sums[at], double(number(x[at])) + (added ? number(y[at]) : 0.0f));
            row.push_back(number(sums[at]));
        }
        const double scale = norm_scale(row, eps);
        for (unsigned at = 0; at < width; at++) {
            errors.add(norms[node * width + at], row[at] * scale * number(weight[at]));
        }
    }
    return errors.most;
}

template <typename T, typename Kernel>
static double silu_mul_error(Kernel kernel) {
    const unsigned nodes = 1 + below(5), width = random_width(), stride = width * (1 + below(2));
    const unsigned blocks = 256 * WIDE<T>;
    const auto gate = values<T>(nodes * stride, 4.0f), up = values<T>(nodes * stride);
    std::vector<T> product(nodes * width);
    launch({nodes, (width + blocks - 1) / blocks}, 256,
           [&] { kernel(gate.data(), up.data(), product.data(), width, stride); });
    Errors errors;
    for (unsigned at = 0; at < nodes * width; at++) {
        const unsigned from = at / width * stride + at % width;
        const double x = number(gate[from]);
        errors.add(product[at], x / (1 + std::exp(-x)) * number(up[from]));
    }
    return errors.most;
}

template <typename T, typename Kernel>
static double move_rows_error(Kernel kernel) {
    const unsigned heads = 1 + below(3), dim = 2 * (1 + below(40)), rows = 1 + below(60), count = 1 + below(rows);
    const unsigned to_rows = count + below(30), blocks = 256 * WIDE<T>;
    std::vector<unsigned> kept(rows);
    std::iota(kept.begin(), kept.end(), 0);
    std::shuffle(kept.begin(), kept.end(), source);
    kept.resize(count);
    const auto from = values<T>(heads * rows * dim), before = values<T>(heads * to_rows * dim);
    auto to = before;
    launch({(count * dim + blocks - 1) / blocks, heads}, 256,
           [&] { kernel(from.data(), to.data(), kept.data(), count, rows, to_rows, dim); });
    Errors errors;
    for (unsigned at = 0; at < heads * to_rows * dim; at++) {
        const unsigned head = at / dim / to_rows, row = at / dim % to_rows;
        // Behind the rows that are kept nothing is written.
        errors.add(to[at], number(row < count ? from[(head * rows + kept[row]) * dim + at % dim] : before[at]));
    }
    return errors.most;
}

// Heads of one kind as the kernel shall make them, [nodes, heads, dim]; their products lie in rows of `stride`.
template <typename T>
struct Kind {
    std::vector<T> products, bias, norm;
    unsigned heads, stride;
    bool is_biased, is_normed;

    Kind(unsigned nodes, unsigned heads, unsigned dim, unsigned more, bool is_biased, bool is_normed)
        : bias(values<T>(heads * dim)), norm(values<T>(dim)), heads(heads), stride(heads * dim + more),
          is_biased(is_biased), is_normed(is_normed) {
        products = values<T>(nodes * stride);
    }

    const T* bias_or_null() const { return is_biased ? bias.data() : nullptr; }
    const T* norm_or_null() const { return is_normed ? norm.data() : nullptr; }

    std::vector<double> head(unsigned node, unsigned head, unsigned dim, float eps) const {
        std::vector<double> x;
        for (unsigned at = 0; at < dim; at++) {
            x.push_back(double(number(products[node * stride + head * dim + at])) +
                        (is_biased ? number(bias[head * dim + at]) : 0.0f));
        }
        const double scale = is_normed ? norm_scale(x, eps) : 1;
        for (unsigned at = 0; at < dim; at++) {
            x[at] *= is_normed ? scale * number(norm[at]) : 1;
        }
        return x;
    }
};

// Of the pair that an element is rotated from.
static double pair_size(const std::vector<double>& rotated, unsigned at) {
    const size_t pairs = rotated.size() / 2;
    return std::max(1.0, std::hypot(rotated[at % pairs], rotated[pairs + at % pairs]));
}

static std::vector<double> rotate(const std::vector<double>& x, const float* angles, double scale) {
    const size_t pairs = x.size() / 2;
    std::vector<double> rotated(x.size());
    for (size_t at = 0; at < pairs; at++) {
        const double cosine = angles[at], sine = angles[pairs + at];
        rotated[at] = scale * (x[at] * cosine - x[pairs + at] * sine);
        rotated[pairs + at] = scale * (x[at] * sine + x[pairs + at] * cosine);
    }
    return rotated;
}

template <typename T, typename Kernel>
static double rotate_write_error(Kernel kernel) {
    const unsigned nodes = 1 + below(4), kv_heads = 1 + below(4), heads = kv_heads * (1 + below(5));
    const unsigned dim = 2 * (1 + below(128)), start = below(5), rows = start + nodes + below(4);
    const bool is_biased = below(2), is_normed = below(2);
    const float eps = 0.01f, scale = 1.0f / std::sqrt(float(dim));
    const unsigned more = below(2) * 2 * kv_heads * dim;
    const Kind<T> query(nodes, heads, dim, more, is_biased, is_normed),
        key(nodes, kv_heads, dim, more, is_biased, is_normed), value(nodes, kv_heads, dim, more, is_biased, false);
    std::vector<float> angles;
    for (unsigned node = 0; node < nodes; node++) {
        const auto turns = values<float>(dim / 2, 3.0f);
        for (float turn : turns) {
            angles.push_back(std::cos(turn));
        }
        for (float turn : turns) {
            angles.push_back(std::sin(turn));
        }
    }
    const auto before = values<T>(kv_heads * rows * dim);
    std::vector<T> rotated(nodes * heads * dim), keys = before, cached = before;
    launch({nodes, (heads + 2 * kv_heads + 7) / 8}, 256, [&] {
        kernel(query.products.data(), key.products.data(), value.products.data(), query.bias_or_null(),
               key.bias_or_null(), value.bias_or_null(), query.norm_or_null(), key.norm_or_null(), angles.data(),
               rotated.data(), keys.data(), cached.data(), heads, kv_heads, dim, rows, start, query.stride,
               key.stride, eps, scale);
    });
    Errors errors;
    for (unsigned node = 0; node < nodes; node++) {
        for (unsigned head = 0; head < heads; head++) {
            const auto expected = rotate(query.head(node, head, dim, eps), &angles[node * dim], scale);
            for (unsigned at = 0; at < dim; at++) {
                errors.add(rotated[(node * heads + head) * dim + at], expected[at], pair_size(expected, at));
            }
        }
    }
    // Of the cache, what is not this step's stays as it was.
    for (unsigned row = 0; row < kv_heads * rows; row++) {
        const unsigned node = row % rows - start, head = row / rows;
        const bool is_new = row % rows >= start && node < nodes;
        const auto expected_key = is_new ? rotate(key.head(node, head, dim, eps), &angles[node * dim], 1)
                                         : std::vector<double>(dim);
        const auto expected_value = is_new ? value.head(node, head, dim, eps) : std::vector<double>(dim);
        for (unsigned at = 0; at < dim; at++) {
            const T old = before[row * dim + at];
            errors.add(keys[row * dim + at], is_new ? expected_key[at] : number(old), pair_size(expected_key, at));
            errors.add(cached[row * dim + at], is_new ? expected_value[at] : number(old));
        }
    }
    return errors.most;
}

int main(int count, char** arguments) {
    const int cases = count > 1 ? std::atoi(arguments[1]) : 20;
    double most = 0;
    for (int at = 0; at < cases; at++) {
        const double errors[] = {
            add_norm_error<float>(add_norm_f32), add_norm_error<__half>(add_norm_f16),
            add_norm_error<__nv_bfloat16>(add_norm_bf16), silu_mul_error<float>(silu_mul_f32),
            silu_mul_error<__half>(silu_mul_f16), silu_mul_error<__nv_bfloat16>(silu_mul_bf16),
            move_rows_error<float>(move_rows_f32),
            move_rows_error<__half>(move_rows_f16), move_rows_error<__nv_bfloat16>(move_rows_bf16),
            rotate_write_error<float>(rotate_write_f32), rotate_write_error<__half>(rotate_write_f16),
            rotate_write_error<__nv_bfloat16>(rotate_write_bf16)};
        for (double error : errors) {
            most = error <= most ? most : error;
        }
        // A little more than the rounding of the result: that of f32 before it. The unit of f32 has room for a few.
        if (!(most < 1.1)) {
            std::printf("case %d: errors of %g halves of a unit\n", at, most);
            return 1;
        }
    }
    std::printf("layer: %d cases, errors of at most %g halves of a unit\n", cases, most);
}
