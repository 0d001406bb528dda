package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	definition_validation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	runtimeschema "k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"
)

func newBufferedReader(text []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(text)) }

// customs holds the schema of each served version of each custom resource.
type customs map[runtimeschema.GroupVersionKind]custom

type custom struct {
	structural *schema.Structural
	validator  validation.SchemaValidator
}

func loadCRDs(dirs []string) (customs, error) {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	decoder := serializer.NewCodecFactory(scheme).UniversalDecoder(apiextensions.SchemeGroupVersion)
	loaded := customs{}
	for _, dir := range dirs {
		files, err := yamlFiles(dir)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			if filepath.Base(file) == "kustomization.yaml" {
				continue
			}
			if err := loaded.load(decoder, file); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	return loaded, nil
}

func (c customs) load(decoder runtime.Decoder, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	definition := &apiextensions.CustomResourceDefinition{}
	if err := runtime.DecodeInto(decoder, text, definition); err != nil {
		return err
	}
	for _, version := range definition.Spec.Versions {
		if !version.Served {
			continue
		}
		described, err := apiextensions.GetSchemaForVersion(definition, version.Name)
		if err != nil {
			return err
		}
		structural, err := schema.NewStructural(described.OpenAPIV3Schema)
		if err != nil {
			return err
		}
		validator, _, err := validation.NewSchemaValidator(described.OpenAPIV3Schema)
		if err != nil {
			return err
		}
		kind := runtimeschema.GroupVersionKind{
			Group: definition.Spec.Group, Version: version.Name, Kind: definition.Spec.Names.Kind,
		}
		c[kind] = custom{structural, validator}
	}
	return nil
}

// check tells what an API server would refuse in an object.
func (c customs) check(document []byte, object *unstructured.Unstructured) []error {
	if known, ok := c[object.GroupVersionKind()]; ok {
		return known.check(object)
	}
	if object.GroupVersionKind().Group == apiextensions.GroupName {
		return checkDefinition(document)
	}
	if object.GroupVersionKind().GroupVersion() == monitoring.SchemeGroupVersion {
		return checkMonitoring(document, object.GetKind())
	}
	return checkBuiltIn(document, object)
}

// checkMonitoring decodes an object of the Prometheus operator strictly.
func checkMonitoring(document []byte, kind string) []error {
	var object any
	switch kind {
	case monitoring.PodMonitorsKind:
		object = &monitoring.PodMonitor{}
	case monitoring.PrometheusRuleKind:
		object = &monitoring.PrometheusRule{}
	default:
		return []error{fmt.Errorf("%s: nothing checks this kind", kind)}
	}
	if err := yaml.UnmarshalStrict(document, object); err != nil {
		return []error{err}
	}
	return nil
}

// checkDefinition decodes a CustomResourceDefinition strictly, sets its defaults and validates it.
func checkDefinition(document []byte) []error {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder(apiextensions.SchemeGroupVersion)
	definition := &apiextensions.CustomResourceDefinition{}
	if err := runtime.DecodeInto(decoder, document, definition); err != nil {
		return []error{err}
	}
	// The API server writes the status.
	for _, version := range definition.Spec.Versions {
		if version.Storage {
			definition.Status.StoredVersions = []string{version.Name}
		}
	}
	var faults []error
	for _, fault := range definition_validation.ValidateCustomResourceDefinition(context.Background(), definition) {
		faults = append(faults, fault)
	}
	return faults
}

func (c custom) check(object *unstructured.Unstructured) []error {
	var faults []error
	content := object.DeepCopy().Object
	options := schema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	for _, path := range pruning.PruneWithOptions(content, c.structural, true, options) {
		faults = append(faults, fmt.Errorf("unknown field %s", path))
	}
	for _, fault := range validation.ValidateCustomResource(nil, object.Object, c.validator) {
		faults = append(faults, fault)
	}
	rules := cel.NewValidator(c.structural, true, celconfig.PerCallLimit)
	if rules != nil {
		broken, _ := rules.Validate(
			context.Background(), field.NewPath(""), c.structural, object.Object, nil, celconfig.RuntimeCELCostBudget)
		for _, fault := range broken {
			faults = append(faults, fault)
		}
	}
	return faults
}
